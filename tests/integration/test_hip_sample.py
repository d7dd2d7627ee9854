from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

needs_gcc = pytest.mark.skipif(
    shutil.which("gcc") is None,
    reason="the emulated GPU needs gcc (on Debian: apt-get install gcc libc6-dev)",
)


@needs_gcc
@pytest.mark.timeout(600)
def test_emulated_gpus_prefill_and_decode_the_tokens_of_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.integration.hip_sample", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
