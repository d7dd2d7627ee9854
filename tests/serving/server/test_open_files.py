from __future__ import annotations

import contextlib
import logging
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.serving.server import open_files
from tests.integration.server_process import PATIENCE_S, start, stop

SPARE = 100  # files that may still be opened; other tests of this process may have any number open


@contextlib.contextmanager
def few_files() -> Iterator[int]:
    """Lowers the limit on open files of this process and its children; yields the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = max(int(file.name) for file in Path("/proc/self/fd").iterdir()) + SPARE
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        yield few
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_soft_limit_is_raised_as_needed(caplog: pytest.LogCaptureFixture) -> None:
    with few_files() as few:
        open_files.allow(few)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few + open_files.NUM_OTHER_FILES
        open_files.allow(1)  # never lowered
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few + open_files.NUM_OTHER_FILES
    assert not caplog.records


def test_a_too_low_hard_limit_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        pytest.skip("there is no limit on this machine")
    with few_files(), caplog.at_level(logging.WARNING):
        open_files.allow(hard)
    assert "ulimit -n" in caplog.text


def test_a_server_accepts_more_connections_than_the_soft_limit(tiny_artifact: Artifact) -> None:
    with few_files() as few:
        service = start(tiny_artifact)
    url = urlsplit(service.url)
    held = [socket.create_connection((url.hostname, url.port), PATIENCE_S) for _ in range(few + SPARE)]
    try:
        assert httpx.get(f"{service.url}/health", timeout=PATIENCE_S).status_code == 200
    finally:
        for connection in held:
            connection.close()
        assert stop(service) == 0
