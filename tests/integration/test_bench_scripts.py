"""The scripts in `bench/` work with the current server and `shortfin-llm bench`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shortfin_apps.llm.artifact.artifact import Artifact

pytestmark = pytest.mark.slow

BENCH = Path(__file__).parents[2] / "bench"


def script(name: str, artifact: Artifact, *flags: str) -> str:
    command = [sys.executable, str(BENCH / name), str(artifact.vmfb.parent), *flags]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


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
    assert rows[1][2:5] == ["+0.000%", "0.000%", "0.000%"]


def test_receipts(tiny_artifact: Artifact) -> None:
    printed = script("receipts.py", tiny_artifact, "--requests=40", "--clients=40", "--pages=10")
    assert "0 of 40 receipts differ" in printed
    assert "num_preemptions_total" in printed
