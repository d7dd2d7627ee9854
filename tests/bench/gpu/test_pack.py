from __future__ import annotations

import json
import shutil
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.__main__ import main
from bench.gpu.mixed import PLAIN, SAMPLINGS
from bench.gpu.models import MODELS
from bench.gpu.pack import parameters, requirements
from bench.gpu.serving import LOADS, REQUESTS_OF_A_CLIENT
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.builder.weights.parameters import parameter_types

pytestmark = pytest.mark.slow

DEVICE = "cpu"
MODES = ("default", "extend-attention")


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """random:tiny, a model with windows and experts, and one with a head, packed for this CPU."""
    folder = tmp_path_factory.mktemp("pack") / "tiny"
    models = "random-tiny,tiny-gpt-oss,tiny-eagle"
    assert main(["pack", str(folder), "--models", models, "--device", DEVICE, "--no-wheels"]) == 0
    return folder


def measured(pack: Path, out: Path, *flags: str, model: str = "random-tiny") -> list[dict[str, Any]]:
    """The results of a run of these parts in this Python."""
    command = ["run", str(pack), "--out", str(out), "--here", "--device", DEVICE, "--models", model]
    assert main([*command, "--sample-seconds", "0.01", *flags]) == 0
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("model", ["random-tiny", "tiny-gpt-oss", "tiny-eagle"])
def test_the_device_chooses_the_tokens_that_the_pack_expects(pack: Path, tmp_path: Path, model: str) -> None:
    records = measured(pack, tmp_path, "--only", "tokens", model=model)
    tokens = [record for record in records if record["part"] == "tokens"]
    assert {(each["mode"], each["depth"]) for each in tokens} == set(product(MODES, (0, 1, 2)))
    assert all(each["equal"] and each["agreed"] == [64] * 20 for each in tokens)
    assert all(each["preemptions"] > 0 for each in tokens if each["accepted"] is None)
    speculating = [each["accepted"] for each in tokens if each["speculative"] == "ngram"]
    assert len(speculating) == 6
    assert all(accepted > 100 for accepted in speculating)
    drafting = [each["proposed"] for each in tokens if each["speculative"] == "mtp"]
    assert len(drafting) == 6 * (model == "tiny-eagle")
    assert all(proposed > 100 for proposed in drafting)


def test_tokens_that_differ_are_counted_up_to_the_first(pack: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(pack, tmp_path / "pack"))
    file = Path("models", "random-tiny", "tokens.json")
    expected = json.loads((pack / file).read_text())
    expected[1][5] += 1
    (changed / file).write_text(json.dumps(expected))
    records = measured(changed, tmp_path / "out", "--only", "tokens")
    agreed = [record["agreed"] for record in records if record["part"] == "tokens"]
    assert agreed == [[64, 5, *[64] * 18]] * 12


def test_every_entry_and_batch_size_is_timed(pack: Path, tmp_path: Path) -> None:
    records = measured(pack, tmp_path, "--only", "entries,engine")
    entries = [record for record in records if record["part"] == "entries"]
    assert [(each["entry"], each["rows"], each["new_tokens"]) for each in entries] == [
        ("decode_bs1", 1, 1),
        ("decode_bs8", 8, 8),
        ("prefill_bs1", 1, 64),
        ("prefill_bs4", 4, 64),
        ("extend", 1, 64),
        ("extend", 9, 40),
        ("decode_bs8", 8, 8),  # as an engine computes an extend of decodes alone
        ("decode_loop_bs1", 1, 1),
        ("decode_loop_bs8", 8, 8),
        ("logprobs_bs1", 1, 1),
        ("sample_bs1", 1, 1),
        ("logprobs_bs8", 8, 8),
        ("sample_bs8", 8, 8),
    ]
    assert all(each[name] > 0 for each in entries for name in ("run_ms", "sync_ms", "queued_ms"))
    engine = [record for record in records if record["part"] == "engine"]
    assert [(each["depth"], each["requests"], each["sampling"]) for each in engine] == [
        *product((0, 1), (1, 8), ("greedy", "whole vocabulary", "presence penalty")),
        *((0, requests, "presence penalty, rows on the host") for requests in (1, 8)),
    ]
    assert all(each["steps"] == 64 for each in engine)
    mixed = [record for record in records if record["part"] == "mixed"]
    assert [(each["mode"], each["depth"], each["sampling"]) for each in mixed] == [
        (mode, depth, sampling)
        for mode, depth in product(MODES, (0, 1, 2))
        for sampling in (SAMPLINGS if depth < 2 else PLAIN)
    ]
    assert all((each["ahead"] > 0) == (each["depth"] > 0) for each in mixed if each["sampling"] == "greedy")
    assert all(each["tokens_per_s"] > each["requests_per_s"] > 0 for each in mixed)
    assert all((each["busy"] is not None) == (each["sampling"] in PLAIN) for each in mixed)
    report = (tmp_path / "results.md").read_text()
    assert "## Engine, steady decode" in report
    assert "## Engine, mixed traffic" in report
    assert (tmp_path / "random-tiny.svg").exists()


def test_the_server_is_measured_over_http(pack: Path, tmp_path: Path) -> None:
    served = [record for record in measured(pack, tmp_path, "--only", "http") if record["part"] == "http"]
    assert [(each["mode"], each["api_processes"], each["workload"], each["depth"]) for each in served] == [
        (mode, processes, workload, 1) for mode, _, processes in LOADS for workload in ("even", "mixed")
    ]
    assert all(each["errors"] == each["short_answers"] == 0 for each in served)
    assert [each["output_tokens"] for each in served] == [
        REQUESTS_OF_A_CLIENT * 4 * 8 * tokens for _ in LOADS for tokens in (128, 64)
    ]


def test_a_part_that_fails_is_named_and_the_run_fails(
    pack: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["run", str(pack), "--out", str(out), "--here", "--device", "no-such", "--only", "tokens"]
    assert main(command) == 1
    assert "| random-tiny | tokens | status 1 |" in (out / "results.md").read_text()
    assert "there is no device 'no-such'" in capfd.readouterr().err


def test_a_folder_with_other_things_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    assert main(["pack", str(tmp_path), "--models", "random-tiny"]) == 2
    assert "neither empty nor a pack" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("name", [model.name for model in MODELS.values() if model.is_timed])
def test_every_parameter_of_the_program_is_listed(name: str) -> None:
    model = MODELS[name].for_device("hip:gfx942")
    target = resolve_target("hip:gfx942")
    listed = {each.name: (each.shape, each.dtype) for each in parameters(model, target)}
    assert listed == parameter_types(model.spec, model.options, target)


def test_wheels_are_those_that_serving_needs() -> None:
    names = {pin.partition("==")[0] for pin in requirements(["shortfin-llm[terminal]"], "3.12")}
    assert {
        "iree-base-runtime",
        "numpy",
        "fastapi",
        "uvicorn",
        "uvloop",
        "httpx-aiohttp",
        "tokenizers",
    } <= names
    assert not names & {"shortfin-llm", "shortfin", "iree-base-compiler", "tinygrad", "colorama", "pytest"}
    assert f"numpy=={metadata.version('numpy')}" in requirements(["shortfin-llm"], "3.12")
