"""Format, style, spelling and types: all of `make lint`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.timeout(600)  # mypy takes a minute where it has no cache
@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "format", "--check"],
        ["ruff", "check"],
        ["codespell_lib", "docs", "bench", *sorted(each.name for each in ROOT.glob("*.md"))],
        ["mypy"],
    ],
    ids=["format", "style", "spelling", "types"],
)
def test_the_sources_pass(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
