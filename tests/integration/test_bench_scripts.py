"""The scripts in `bench/` work with the current server and `shortfin-llm bench`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.model.spec import BuildOptions
from tests.conftest import BuildTiny

pytestmark = pytest.mark.slow

BENCH = Path(__file__).parents[2] / "bench"


def script(name: str, artifact: Artifact, *flags: str) -> str:
    command = [sys.executable, str(BENCH / name), str(artifact.vmfb.parent), *flags]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_modes(tiny_artifact: Artifact, tmp_path: Path) -> None:
    file = tmp_path / "modes.json"
    printed = script("modes.py", tiny_artifact, "--workloads=W2", "--repeat=1", f"--json={file}")
    cells = [cell.strip() for cell in printed.splitlines()[-1].strip("|").split("|")]
    assert cells[0] == "W2"
    computed = json.loads(file.read_text())["W2"]["computed"]
    # eight requests of 128 in and 128 out, and the bench's own first one of 8 out
    tokens = 8 * (128 + 127) + 128 + 7
    assert {label: c["prefill"] + c["decode"] for label, c in computed.items()} == {
        "default": tokens,
        "extend": tokens,
    }
    paddings = [computed[label]["padding"] for label in ("default", "extend")]
    assert cells[5] == ", ".join(f"{padding / (tokens + padding):.1%}" for padding in paddings)
    assert paddings[1] <= tokens / 50, "an extend has no padding, a decode loop at most a quarter"


def test_long_prefill(tiny_artifact: Artifact) -> None:
    flags = ("--streams=2", "--prompt-tokens=400", "--stream-tokens=900", "--token-budget=64")
    printed = script("long_prefill.py", tiny_artifact, *flags)
    assert printed.count("64 tokens in one invocation: ") == 2


def test_overload(tiny_artifact: Artifact, tmp_path: Path) -> None:
    """At 16 times the capacity, as half a second on a busy machine underestimates it several times."""
    flags = ("--ramp=0.2", "--seconds=0.5", "--max-running=2", "--max-queue=2", "--loads=16", "--no-plot")
    printed = script("overload.py", tiny_artifact, *flags, f"--output={tmp_path / 'overload'}")
    [trial] = json.loads((tmp_path / "overload.json").read_text())["trials"]
    assert trial["capacity"]["output_tokens_per_s"] > 0
    assert trial["load"]["refused"] > 0
    assert (trial["capacity"]["failed"], trial["load"]["failed"]) == (0, 0)
    assert printed.splitlines()[-1].startswith("| 16x | ")


def test_soak(tiny_artifact: Artifact) -> None:
    """Too short to measure memory growth, which `make soak` does."""
    command = [sys.executable, str(BENCH / "soak.py"), str(tiny_artifact.vmfb.parent)]
    run = subprocess.run([*command, "--minutes=0.05", "--clients=16"], capture_output=True, text=True)
    assert "ok  no error but the clients' own: 0" in run.stdout
    assert "ok  every page is back" in run.stdout
    assert "ok  /health: 200" in run.stdout


def test_perplexity(tiny_artifact: Artifact) -> None:
    """The same model twice has equal perplexity, about that of a uniform distribution, as it is random."""
    printed = script("perplexity.py", tiny_artifact, str(tiny_artifact.vmfb.parent), "--length=16")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines()[2:]]
    assert tiny_artifact.vocab_size is not None
    assert float(rows[0][1]) > tiny_artifact.vocab_size / 4
    assert rows[0][1] == rows[1][1]
    assert rows[1][2] == "+0.00%"


def test_decode_ahead(build_tiny: BuildTiny) -> None:
    """A steady decode uploads nothing, but for the batch's start and its block table once a page."""
    artifact = build_tiny(BuildOptions(decode_loop_sizes=(1, 2)))
    printed = script("decode_ahead.py", artifact, "--rows=2", "--tokens=40", "--repeat=1")
    for line in printed.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[1] in ("greedy", "sampled")
        without, ahead = map(float, cells[-2:])
        assert without >= 3 > 0.5 > ahead


def test_receipts(tiny_artifact: Artifact) -> None:
    printed = script("receipts.py", tiny_artifact, "--requests=40", "--clients=40", "--pages=10")
    assert "0 of 40 receipts differ" in printed
    assert "num_preemptions_total" in printed
