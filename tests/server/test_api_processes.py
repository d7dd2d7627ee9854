"""Processes that are kept, over short scripts in their place; tests/integration has the real ones."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shortfin_apps.llm.components.engine_link.api_links import ApiLinks
from shortfin_apps.llm.server import config_sources
from shortfin_apps.llm.server.api_process import ApiProcessOptions
from shortfin_apps.llm.server.api_processes import ApiProcesses
from shortfin_apps.llm.server.config import ServerConfigError

pytestmark = pytest.mark.timeout(60)

PREPARED = """
import os, signal, socket, sys, time
from shortfin_apps.llm.components.engine_link.connection import LENGTH
from shortfin_apps.llm.components.engine_link.messages import Prepared, encode
sys.stdin.buffer.read()
open(os.path.join(sys.argv[1], str(os.getpid())), "w").close()
text = encode(Prepared())
socket.socket(fileno=int(sys.argv[3])).sendall(LENGTH.pack(len(text)) + text)
"""
WAITS = "time.sleep(600)"
IGNORES_SIGTERM = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


@asynccontextmanager
async def kept(script: str, count: int, pids: Path) -> AsyncIterator[tuple[ApiProcesses, ApiLinks]]:
    """Ended with the context; each process that is prepared leaves a file named by its pid."""
    config = config_sources.load({"artifact": "model"}, {})
    options = ApiProcessOptions(config=config, name="m", engine_pid=0)
    links = ApiLinks()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-c", script, str(pids)]
        processes = ApiProcesses(links, listener, command, options, count)
        await processes.start()
        try:
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
