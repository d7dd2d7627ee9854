from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from shortfin_apps.llm.tools.cluster import process
from shortfin_apps.llm.tools.cluster.ports import LOOPBACK, Wanted, free_ports
from shortfin_apps.llm.tools.cluster.process import Process, Program

lines: list[tuple[str, str]] = []


def show(name: str, line: str) -> None:
    lines.append((name, line))


def pretend(tmp_path: Path, **settings: Any) -> Program:
    (port,) = free_ports([Wanted(LOOPBACK, 0, "--port")])
    values = {
        "port": port,
        "name": "w",
        "diary": str(tmp_path / "diary"),
        **settings,
    }
    return Program("worker 1", ["tests.tools.cluster.pretend_server"], values)


async def until_written(path: Path) -> None:
    while not path.exists() or not path.read_text():
        await asyncio.sleep(0.01)


async def test_its_log_is_shown_under_its_name_and_the_tail_kept(tmp_path: Path) -> None:
    lines.clear()
    running = await Process.start(pretend(tmp_path, fail=True), show)
    assert await running.wait() == 3
    assert lines == [("worker 1", "no model here")]
    assert list(running.tail) == ["no model here"]


async def test_stop_lets_it_end_by_itself(tmp_path: Path) -> None:
    running = await Process.start(pretend(tmp_path), show)
    await until_written(tmp_path / "diary")
    await running.stop(60)
    assert (tmp_path / "diary").read_text() == "w started\nw ended\n"


async def test_stop_kills_what_does_not_end(tmp_path: Path) -> None:
    running = await Process.start(pretend(tmp_path, stubborn=True), show)
    await until_written(tmp_path / "diary")
    await running.stop(0.01)
    assert await running.wait() == -9


async def test_settings_of_the_cluster_are_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHORTFIN_LLM_PORT", "1")
    monkeypatch.setenv("SHORTFIN_LLM_CACHE", "/cache")
    environment = process._environment()
    assert "SHORTFIN_LLM_PORT" not in environment
    assert environment["SHORTFIN_LLM_CACHE"] == "/cache"


async def test_a_log_that_cannot_be_shown_is_read_nevertheless(tmp_path: Path) -> None:
    def broken(*_: str) -> None:
        raise BrokenPipeError

    running = await Process.start(pretend(tmp_path, fail=True), broken)
    assert await running.wait() == 3
    assert list(running.tail) == ["no model here"]


@pytest.mark.timeout(20)
async def test_stop_ends_a_stopped_process_in_order(tmp_path: Path) -> None:
    running = await Process.start(pretend(tmp_path), show)
    await until_written(tmp_path / "diary")
    os.kill(running.pid, signal.SIGSTOP)
    await running.stop(60)
    assert (tmp_path / "diary").read_text() == "w started\nw ended\n"
