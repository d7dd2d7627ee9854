"""A model that is built is served without IREE's compiler, and what needs it says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WITHOUT = "import sys; sys.modules['iree.compiler'] = None; "  # importing it fails, as if it were not there


def run(code: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SHORTFIN_LLM_CACHE": str(cache)}
    command = [sys.executable, "-c", WITHOUT + code]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "module",
    [
        "serving.server.command",
        "serving.server.serve",
        "serving.loading",
        "tools.inspection.cli",
        "builder.cache_list",
    ],
)
def test_what_needs_no_compiler_imports_none(module: str, tmp_path: Path) -> None:
    done = run(f"import shortfin_apps.llm.{module}", tmp_path)
    assert done.returncode == 0, done.stderr


def test_build_says_what_to_install(tmp_path: Path) -> None:
    main = "from shortfin_apps.llm.cli import main; sys.exit(main(['build', 'random:tiny', '--in-cache']))"
    done = run(main, tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "error: building a model needs IREE's compiler: run `pip install 'shortfin-llm[build]'`\n"
    )
