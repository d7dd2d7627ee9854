"""The scripts of `bench/` that compare the modes still understand the server and the bench."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from shortfin_apps.llm.build.artifact import Artifact

BENCH = Path(__file__).parents[2] / "bench"


def script(name: str, artifact: Artifact, *flags: str) -> str:
    command = [sys.executable, str(BENCH / name), str(artifact.vmfb.parent), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_both_modes_side_by_side(tiny_artifact: Artifact, tmp_path: Path) -> None:
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
    assert (
        cells[5] == f"{computed['default']['padding'] / (tokens + computed['default']['padding']):.1%}, 0.0%"
    )


def test_a_long_prompt_beside_streams(tiny_artifact: Artifact) -> None:
    flags = ("--streams=2", "--prompt-tokens=400", "--stream-tokens=900", "--token-budget=64")
    printed = script("long_prefill.py", tiny_artifact, *flags)
    assert "128 tokens in one invocation: " in printed
    assert "64 tokens in one invocation: " in printed
