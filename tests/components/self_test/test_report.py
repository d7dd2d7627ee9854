from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from shortfin_apps.llm.components.self_test import report
from shortfin_apps.llm.components.self_test.computed import Computed
from shortfin_apps.llm.components.self_test.locate import Location
from shortfin_apps.llm.components.self_test.report import Subject
from shortfin_apps.llm.components.self_test.self_test import EntryFailure, Outcome
from tests.components.self_test.test_computed import FILE

KERNELS = (
    "Embed: linalg; not triton/layers, which needs a GPU",
    "Norm: fused/layer, given a CPU",
    "Linear: fused/layer, given a CPU",
    "Attend: avx512/paged_attention, given AVX-512 with bf16; a decode's is a stage of fused/layer",
    "TopK: cpu/top_k, given a CPU",
)
SUBJECT = Subject(device="local-task", identity="abc", kernels=KERNELS)
FAILURE = EntryFailure("decode_bs8", "differs by 0.31 of the logits' deviation", 0.31, 0, 17)
OTHER = EntryFailure("decode_bs4", "fails")


def test_a_sentence_names_entry_layer_and_kernels() -> None:
    text = report.sentence(SUBJECT, [FAILURE, OTHER], Location(7, "keys", "`decode_bs1`"))
    assert text == (
        "self-test: `decode_bs8` differs by 0.31 of the logits' deviation, first in layer 7: keys differ "
        "from those of `decode_bs1`; computed by fused/layer, avx512/paged_attention; 1 other entry fails too"
    )


def test_behind_the_layers_other_kernels_are_named() -> None:
    text = report.sentence(SUBJECT, [FAILURE], Location(None, "", "the reference"))
    assert "after the last layer" in text
    assert text.endswith("computed by fused/layer, cpu/top_k")


def test_without_a_place_nothing_is_said_of_it() -> None:
    assert report.sentence(SUBJECT, [OTHER], None) == "self-test: `decode_bs4` fails"


def test_linalg_is_named_where_there_is_nothing_else() -> None:
    assert report.kernels_at(("Norm: linalg", "Linear: linalg"), Location(None, "", "")) == ["linalg"]


def test_a_report_is_json_also_of_rows_that_are_not_finite() -> None:
    rows = [Computed(entry="decode_bs8", row=0, prompt=0, position=17, error=float("inf"), bits=b"\x01")]
    outcome = Outcome(FILE, rows, {"decode_bs4": "failed"}, ["extend"])
    document = report.document(SUBJECT, outcome, [FAILURE], Location(7, "keys", "the reference"))
    path = report.write(document)
    assert path is not None
    found = json.loads(path.read_text())
    path.unlink()
    assert found["artifact"] == "abc"
    assert found["entries"]["decode_bs8"]["rows"][0] == {
        "row": 0,
        "prompt": 0,
        "position": 17,
        "error": None,
        "problem": None,
        "bits": "01",
    }
    assert found["entries"]["decode_bs4"]["problem"] == "failed"
    assert not found["entries"]["extend"]["is_tested"]


def test_where_nothing_can_be_written_there_is_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert report.write({}) is None


def test_the_cpu_has_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: A CPU\n")
    monkeypatch.setattr(report, "_CPUINFO", info)
    assert report.cpu_model() == "A CPU"
    monkeypatch.setattr(report, "_CPUINFO", tmp_path / "missing")
    assert report.cpu_model()
