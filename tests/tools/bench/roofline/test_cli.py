from __future__ import annotations

import json

import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.cli import main
from shortfin_apps.llm.tools.bench.roofline.report import SCHEMA


def roofline(artifact: Artifact, *argv: str) -> int:
    return main(["bench", "roofline", str(artifact.vmfb.parent), "--repeat", "1", *argv])


def test_every_kind_of_entry_is_measured(tiny_artifact: Artifact, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--context", "20", "--prompt-tokens", "32", "--json", "-"]
    patterns = ["--entry", "decode_bs[14]", "--entry", "prefill_bs1", "--entry", "extend"]
    assert roofline(tiny_artifact, *options, *patterns) == 0
    doc = json.loads(capsys.readouterr().out)
    assert doc["schema"] == SCHEMA
    assert [(e["entry"], e["rows"], e["context"]) for e in doc["entries"]] == [
        ("decode_bs1", 1, 20),
        ("decode_bs4", 4, 20),
        ("prefill_bs1", 1, 32),
        ("extend", 1, 32),
    ]
    for entry in doc["entries"]:
        floor = max(entry["bytes"] / entry["bytes_per_s"][0], entry["flops"] / entry["flops_per_s"][0])
        assert entry["floor_s"] == pytest.approx(floor)
        assert entry["ratio"] == pytest.approx(entry["time_s"][0] / floor)


def test_the_table_has_a_line_for_each(tiny_artifact: Artifact, capsys: pytest.CaptureFixture[str]) -> None:
    assert roofline(tiny_artifact, "--context", "20,40", "--entry", "decode_bs1") == 0
    out = capsys.readouterr().out
    assert [line.split("│")[3].strip() for line in out.splitlines() if "decode_bs1" in line] == ["20", "40"]
    assert "GB/s" in out


def test_an_unknown_entry_is_named(tiny_artifact: Artifact, capsys: pytest.CaptureFixture[str]) -> None:
    assert roofline(tiny_artifact, "--entry", "verify") == 2
    assert "no entry matches verify" in capsys.readouterr().err


def test_a_profile_lists_dispatches(tiny_artifact: Artifact, capsys: pytest.CaptureFixture[str]) -> None:
    status = roofline(tiny_artifact, "--context", "20", "--entry", "decode_bs1", "--profile")
    out, err = capsys.readouterr()
    if "perf events" in err:
        pytest.skip(err)
    assert status == 0
    assert "decode_bs1, 1 x 1, context 20" in out
    assert "%" in out


def test_times_are_not_asked_of_an_emulated_gpu(
    tiny_artifact: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    assert roofline(tiny_artifact, "--emulated") == 2
    assert "--repeat is about time" in capsys.readouterr().err


def test_an_emulated_gpu_does_not_run_code_for_cpus(
    tiny_artifact: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "roofline", str(tiny_artifact.vmfb.parent), "--emulated"]) == 2
    assert "was built for cpu" in capsys.readouterr().err
