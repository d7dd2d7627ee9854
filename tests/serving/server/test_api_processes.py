"""Processes that are kept, over short scripts in their place; tests/integration has the real ones."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shortfin_apps.llm import restart_delay
from shortfin_apps.llm.serving.engine_link.api_link import ApiLink
from shortfin_apps.llm.serving.engine_link.api_links import ApiLinks
from shortfin_apps.llm.serving.server import api_processes, config_sources
from shortfin_apps.llm.serving.server.api_process import ApiProcessOptions
from shortfin_apps.llm.serving.server.api_processes import ApiProcesses
from shortfin_apps.llm.serving.server.config import ServerConfigError

pytestmark = pytest.mark.timeout(60)

PREPARED = """
import os, signal, socket, sys, time
from shortfin_apps.llm.serving.engine_link.connection import LENGTH
from shortfin_apps.llm.serving.engine_link.messages import Prepared, encode
sys.stdin.buffer.read()
text = encode(Prepared())
link = socket.socket(fileno=int(sys.argv[3]))
link.sendall(LENGTH.pack(len(text)) + text)
open(os.path.join(sys.argv[1], str(os.getpid())), "w").close()  # last: a test may kill it now
"""
WAITS = "time.sleep(600)"
IGNORES_SIGTERM = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


@asynccontextmanager
async def kept(script: str, count: int, pids: Path) -> AsyncIterator[tuple[ApiProcesses, ApiLinks]]:
    """Ended with the context; each process that is prepared leaves a file named by its pid."""
    config = config_sources.load({"artifact": "model"})
    options = ApiProcessOptions(config=config, name="m", engine_pid=0)
    links = ApiLinks()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-c", script, str(pids)]
        processes = ApiProcesses(links, listener, command, options, count)
        try:
            await processes.start()
            yield processes, links
        finally:
            processes.signal()
            await processes.until_ended(patience_s=0.2)
    while links._links:
        await asyncio.sleep(0.01)


async def until_prepared(pids: Path, count: int) -> set[int]:
    while len(found := {int(path.name) for path in pids.iterdir()}) < count:
        await asyncio.sleep(0.01)
    return found


def num_open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_a_process_that_ends_before_it_is_prepared_fails_the_start(tmp_path: Path) -> None:
    async with kept("raise SystemExit(2)", 2, tmp_path) as (processes, _):
        with pytest.raises(ServerConfigError, match=r"API process \d could not start"):
            await processes.failed


async def test_a_process_that_ends_later_is_started_again(tmp_path: Path) -> None:
    async with kept(PREPARED, 1, tmp_path) as (processes, _):
        assert len(await until_prepared(tmp_path, 2)) == 2
        assert not processes.failed.done()


async def test_a_process_that_ignores_the_signal_is_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = IGNORES_SIGTERM.join(["import signal\n", PREPARED]) + WAITS
    async with kept(script, 2, tmp_path):
        pids = await until_prepared(tmp_path, 2)
    assert "2 API processes did not end in time" in caplog.text
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


async def test_processes_end_at_the_signal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with kept(PREPARED + WAITS, 3, tmp_path):
        pids = await until_prepared(tmp_path, 3)
    assert "in time" not in caplog.text
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


async def test_a_second_signal_kills_what_does_not_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_processes, "HURRY_S", 0.0)
    script = IGNORES_SIGTERM.join(["import signal\n", PREPARED]) + WAITS
    async with kept(script, 2, tmp_path) as (processes, _):
        pids = await until_prepared(tmp_path, 2)
        processes.signal()
        ending = asyncio.create_task(processes.until_ended(patience_s=1e9))
        await asyncio.sleep(0)
        assert not ending.done()
        processes.signal()
        await ending
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert "2 API processes did not end in time" in caplog.text


async def test_a_stopped_process_ends_at_the_first_signal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with kept(PREPARED + WAITS, 2, tmp_path) as (processes, _):
        for pid in await until_prepared(tmp_path, 2):
            os.kill(pid, signal.SIGSTOP)
        processes.signal()
        await processes.until_ended(patience_s=1e9)
    assert "in time" not in caplog.text


OUT_OF_FILES = OSError(errno.EMFILE, os.strerror(errno.EMFILE))


class Failures:
    """Replaces `owner.name`, which raises `error` while `num_left` is above 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception) -> None:
        self.num_left = 0
        function = getattr(owner, name)

        def fail_first(*args: Any, **kwargs: Any) -> Any:
            if self.num_left > 0:
                self.num_left -= 1
                raise error
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, fail_first)


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (socket, "socketpair", OUT_OF_FILES),
        (asyncio, "create_subprocess_exec", OUT_OF_FILES),
        (asyncio, "create_subprocess_exec", BlockingIOError(errno.EAGAIN, "no more processes")),
        (ApiLink, "open", RuntimeError("a bug")),
    ],
)
async def test_a_process_that_cannot_be_started_again_is_tried_until_it_can(
    owner: Any,
    name: str,
    error: Exception,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(restart_delay, "FIRST_S", 0.01)
    failing = Failures(monkeypatch, owner, name, error)
    async with kept(PREPARED + WAITS, 2, tmp_path) as (processes, links):
        before = await until_prepared(tmp_path, 2)
        gc.collect()  # closes what other tests left open, before it is counted
        links_before, fds_before = set(links._links), num_open_files()
        failing.num_left = 3
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        while len({int(path.name) for path in tmp_path.iterdir()} - before) < 2 or failing.num_left:
            await asyncio.sleep(0.01)
        assert not any(keeper.done() for keeper in processes._keepers)
        while len(processes._running) != 2 or links_before & set(links._links):
            await asyncio.sleep(0.01)
        assert len(links._links) == 2
        assert num_open_files() <= fds_before, "a failed start leaves nothing open"
    assert caplog.text.count("cannot be started") == 3


async def test_a_start_without_descriptors_is_refused_and_ends_what_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Failures(monkeypatch, socket, "socketpair", OUT_OF_FILES).num_left = 1
    with pytest.raises(ServerConfigError, match=r"cannot be started .*Too many open files.*ulimit -n"):
        async with kept(PREPARED + WAITS, 3, tmp_path):
            pass


async def test_a_start_of_several_that_fail_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def socketpair() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "socketpair", socketpair)
    with pytest.raises(ServerConfigError, match="Too many open files"):
        async with kept(PREPARED + WAITS, 3, tmp_path):
            pass
    gc.collect()
    assert "never retrieved" not in caplog.text
