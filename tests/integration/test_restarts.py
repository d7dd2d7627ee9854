"""`--restart-on-device-loss` with real servers: one that crashes comes back, and none is left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from tests.integration.server_process import PATIENCE_S, Service, start, stop
from tests.integration.test_api_processes import is_alive, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FLAGS = ("--restart-on-device-loss", "--self-test", "off")
BODY = {"prompt": "The capital of France", "temperature": 0, "ignore_eos": True, "max_tokens": 8}


def child_of(service: Service) -> int:
    found = subprocess.run(
        ["pgrep", "-P", str(service.process.pid), "-f", "supervised"], capture_output=True, text=True
    )
    return int(found.stdout)


def text(service: Service) -> str:
    """Waits while the server starts: the port's socket keeps the connection."""
    until(lambda: httpx.get(f"{service.url}/ready", timeout=PATIENCE_S).status_code == 200)
    answer = httpx.post(f"{service.url}/v1/completions", json=BODY, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    given: str = answer.json()["choices"][0]["text"]
    return given


@pytest.mark.parametrize("processes", [0, 2])
def test_a_server_that_crashes_is_started_again_on_the_same_port(
    tiny_artifact: Artifact, tmp_path: Path, processes: int
) -> None:
    service = start(tiny_artifact, *FLAGS, "--api-processes", str(processes), "--dump-dir", str(tmp_path))
    try:
        expected, first = text(service), child_of(service)
        subprocess.run(["kill", "-SEGV", str(first)], check=True)
        until(lambda: not is_alive(first))
        assert text(service) == expected
        second = child_of(service)
        assert second != first
        service.process.send_signal(signal.SIGUSR1)
        until(lambda: list(tmp_path.glob("*.jsonl.gz")))
    finally:
        assert stop(service) == 0
    assert not is_alive(second)


def test_no_server_outlives_its_supervisor(tiny_artifact: Artifact) -> None:
    service = start(tiny_artifact, *FLAGS)
    child = child_of(service)
    service.process.kill()
    until(lambda: not is_alive(child))
    stop(service)


def test_a_start_that_is_refused_is_not_tried_again(tmp_path: Path) -> None:
    command = ["-m", "shortfin_apps.llm.server", "--port", "0", *FLAGS, str(tmp_path)]
    ended = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 2
    assert str(tmp_path) in ended.stderr
    assert "starting it again" not in ended.stderr
