from __future__ import annotations

import contextlib
import gc
import io
import logging
import resource
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from rich.console import Console

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.serving.server import start_up
from shortfin_apps.llm.serving.server.config import ServerConfigError
from shortfin_apps.llm.serving.server.model_loading import Loaded
from shortfin_apps.llm.serving.server.start_up import (
    allow_open_files,
    announce,
    exit_status_of,
    settled,
    warm_up_progress,
)
from tests.integration.server_process import PATIENCE_S, start, stop
from tests.serving.api.loopback import loopback

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
        allow_open_files(few)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few + start_up.NUM_OTHER_FILES
        allow_open_files(1)  # never lowered
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few + start_up.NUM_OTHER_FILES
    assert not caplog.records


def test_collections_skip_what_is_loaded() -> None:
    before, num_frozen = gc.get_threshold(), gc.get_freeze_count()
    loaded: list[list[int]] = [[]]
    try:
        assert settled(loaded) is loaded
        assert gc.get_freeze_count() > num_frozen
        assert gc.get_threshold()[0] == start_up.COLLECT_AFTER
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


def test_a_too_low_hard_limit_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        pytest.skip("there is no limit on this machine")
    with few_files(), caplog.at_level(logging.WARNING):
        allow_open_files(hard)
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


def shown(is_terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=60)
    with warm_up_progress(console) as on_progress:
        for done in range(4):
            on_progress(done, 3)
    return out.getvalue()


def test_a_terminal_shows_how_many_are_done() -> None:
    text = shown(is_terminal=True)
    assert "warming up" in text
    assert "3/3" in text


def test_a_log_stays_free_of_it() -> None:
    assert shown(is_terminal=False).strip() == ""


def test_a_standard_output_without_a_reader_does_not_end_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def write(self, _: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Broken())
    announce("m", "http://127.0.0.1:1", has_chat=True, logs_json=False)


pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    "failure",
    [
        MemoryError(),
        RuntimeError("can't start new thread"),
        RuntimeError("Error creating driver: INTERNAL; thread creation failed with 11"),
        RuntimeError("RESOURCE_EXHAUSTED; libc allocator failed the request;\nwhile invoking"),
    ],
    ids=str,
)
async def test_running_out_of_memory_is_one_sentence(failure: Exception) -> None:
    def load(loaded: Loaded) -> Loaded:
        raise failure

    async with loopback(load=load) as running:
        await running.ended()
    with pytest.raises(ServerConfigError, match="out of memory") as caught:
        exit_status_of(running.server.failure, was_forced=False)
    assert "\n" not in str(caught.value)
