"""A server whose model computes something else than it should does not start, and says what is wrong."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from shortfin_apps.llm.artifact import file_names
from shortfin_apps.llm.artifact.artifact import Artifact
from tests.integration.server_process import PATIENCE_S, llm, start_with, stop

pytestmark = pytest.mark.slow


@pytest.fixture
def copy(tiny_artifact: Artifact, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_artifact.vmfb.parent, tmp_path / "tiny"))


def test_a_flipped_bit_of_the_parameters_is_found_without_hashes(copy: Path) -> None:
    path = copy / file_names.PARAMETERS
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    for at in range(len(content) // 2, len(content), 1023):
        content[at | 1] ^= 0x40  # the highest bit of a bf16's exponent
    path.write_bytes(content)
    command = llm("serve", str(copy), "--port", "0", "--verify", "none")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 2
    log = ended.stderr
    assert "self-test: `prefill_bs1`" in log
    found = re.search(r"report written to (\S+\.json)", log)
    assert found is not None
    Path(found[1]).unlink()
    running = start_with(str(copy), "--verify", "none", "--self-test", "off")
    assert running.metric("shortfin_llm:self_tests_total") == 0
    assert stop(running) == 0


def test_a_right_model_is_served_and_the_test_counted(copy: Path) -> None:
    running = start_with(str(copy), "--self-test", "hourly")
    assert httpx.get(f"{running.url}/ready").status_code == 200
    assert running.metric("shortfin_llm:self_tests_total") == 1
    assert running.metric("shortfin_llm:self_test_failures_total") == 0
    running.log.seek(0)
    assert "self-test passed" in running.log.read()
    assert stop(running) == 0


def test_an_artefact_without_a_self_test_is_served(copy: Path) -> None:
    (copy / file_names.SELF_TEST).unlink()
    path = copy / file_names.MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["files"][file_names.SELF_TEST]
    path.write_text(json.dumps(manifest))
    running = start_with(str(copy))
    running.log.seek(0)
    assert "has no self-test" in running.log.read()
    assert stop(running) == 0
