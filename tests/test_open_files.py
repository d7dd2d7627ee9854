from __future__ import annotations

import logging
import resource
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from shortfin_apps.llm import open_files
from shortfin_apps.llm.build.artifact import Artifact
from tests.integration.server_process import PATIENCE_S, start, stop

FEW = 100


@pytest.fixture
def few_files() -> Iterator[int]:
    """This process, and those it starts, may open few files; returns how many they may allow themselves."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_limit_is_raised_to_what_is_needed(few_files: int, caplog: pytest.LogCaptureFixture) -> None:
    open_files.allow(FEW)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == FEW + open_files.NUM_OTHER_FILES
    open_files.allow(1)  # never lowered
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == FEW + open_files.NUM_OTHER_FILES
    assert not caplog.records


def test_a_limit_that_cannot_be_raised_is_warned_about(
    few_files: int, caplog: pytest.LogCaptureFixture
) -> None:
    if few_files == resource.RLIM_INFINITY:
        pytest.skip("there is no limit on this machine")
    with caplog.at_level(logging.WARNING):
        open_files.allow(few_files)
    assert "ulimit -n" in caplog.text


def test_a_server_takes_more_connections_than_its_shell_lets_files_be_open(tiny_artifact: Artifact) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, hard))
    try:
        service = start(tiny_artifact)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    url = urlsplit(service.url)
    held = [socket.create_connection((url.hostname, url.port), PATIENCE_S) for _ in range(2 * FEW)]
    try:
        assert httpx.get(f"{service.url}/health", timeout=PATIENCE_S).status_code == 200
    finally:
        for connection in held:
            connection.close()
        assert stop(service) == 0
