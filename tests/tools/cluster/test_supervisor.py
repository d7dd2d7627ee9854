"""A cluster of pretended servers: what starts, ends and comes back, and in which order."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shortfin_apps.llm import restart_delay
from shortfin_apps.llm.tools.cluster import supervisor as supervising
from shortfin_apps.llm.tools.cluster.ports import LOOPBACK, HeldPort
from shortfin_apps.llm.tools.cluster.supervisor import ClusterError, Member, Process, Program, Supervisor
from tests.tools.cluster.test_ports import answers, is_taken, until_refused

lines: list[tuple[str, str]] = []


def show(name: str, line: str) -> None:
    lines.append((name, line))


def pretend(tmp_path: Path, **settings: Any) -> Program:
    values = {
        "port": 0,
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
    environment = supervising._environment()
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


WORKERS = 2


@dataclass
class Cluster:
    supervisor: Supervisor
    diary: Path
    said: list[str] = field(default_factory=list)

    def entries(self) -> list[str]:
        return self.diary.read_text().splitlines() if self.diary.exists() else []

    async def until_said(self, what: str) -> str:
        while not (found := [line for line in self.said if what in line]):
            await asyncio.sleep(0.01)
        return found[0]


@asynccontextmanager
async def cluster(
    tmp_path: Path, start_timeout_s: float = 60, held: HeldPort | None = None, **of_worker_1: Any
) -> AsyncIterator[Cluster]:
    """`held` and the other settings are worker 1's. Ports are held, as another test may take a free one."""
    names = [*(f"worker {number}" for number in range(1, WORKERS + 1)), "router"]
    diary, members = tmp_path / "diary", []
    ports = [HeldPort(LOOPBACK) for _ in names]
    for name, made in zip(names, ports, strict=True):
        own = of_worker_1 if name == "worker 1" else {}
        port = held if held is not None and name == "worker 1" else made
        settings = {"port": port.port, "name": name, "diary": str(diary), **own}
        words = ["tests.tools.cluster.pretend_server", *map(str, port.fds)]
        members.append(
            Member(Program(name, words, settings, port=port), f"http://{LOOPBACK}:{port.port}/ready")
        )
    said: list[str] = []
    supervisor = Supervisor(
        members[:-1],
        members[-1],
        start_timeout_s=start_timeout_s,
        drain_s=30,
        announce=said.append,
        show=lambda name, line: None,
    )
    try:
        yield Cluster(supervisor, diary, said)
    finally:
        await supervisor.stop()
        for made in ports:
            made.close()


def process_in(line: str) -> int:
    return int(line.partition("(process ")[2].partition(",")[0].rstrip(")"))


async def test_the_router_starts_last_and_ends_first(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        await running.supervisor.start()
        assert len(running.said) == WORKERS
    entries = running.entries()
    assert entries[WORKERS : WORKERS + 2] == ["router started", "router ended"]
    assert sorted(entries[-WORKERS:]) == ["worker 1 ended", "worker 2 ended"]
    assert len(entries) == 2 * (WORKERS + 1)


async def test_a_killed_worker_comes_back(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        await running.supervisor.start()
        os.kill(process_in(await running.until_said("worker 2")), signal.SIGKILL)
        again = await running.until_said("worker 2 is ready again")
        os.kill(process_in(again), 0)  # it is there
    assert running.entries().count("worker 2 started") == 2
    assert running.entries().count("worker 1 started") == 1


async def test_a_worker_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    async with cluster(tmp_path, fail=True) as running:
        with pytest.raises(ClusterError, match=r"worker 1 ended with status 3.*\n  no model here"):
            await running.supervisor.start()
    assert "router started" not in running.entries()


async def test_a_worker_that_is_not_ready_in_time_is_named(tmp_path: Path) -> None:
    async with cluster(tmp_path, start_timeout_s=0) as running:
        with pytest.raises(ClusterError, match=r"worker \d was not ready within 0 s \(--start-timeout\)"):
            await running.supervisor.start()


async def test_the_time_to_start_begins_anew_after_a_suspension(tmp_path: Path) -> None:
    async with cluster(tmp_path, start_timeout_s=0.01) as running:
        hours = itertools.count()  # every look at the clock is an hour later
        running.supervisor._clock = lambda: 3600.0 * next(hours)
        await running.supervisor.start()


async def test_kill_ends_what_does_not_drain(tmp_path: Path) -> None:
    async with cluster(tmp_path, stubborn=True) as running:
        await running.supervisor.start()
        stopping = asyncio.create_task(running.supervisor.stop())
        while not any(entry == "worker 2 ended" for entry in running.entries()):
            await asyncio.sleep(0.01)
        assert not stopping.done()
        running.supervisor.kill()
        await stopping


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "too many open files"), RuntimeError("a bug")])
async def test_a_worker_that_cannot_be_started_again_is_tried_until_it_can(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(restart_delay, "FIRST_S", 0.01)
    start, num_left = Process.start, 3

    async def failing(*args: Any) -> Process:
        nonlocal num_left
        if num_left > 0:
            num_left -= 1
            raise error
        return await start(*args)

    async with cluster(tmp_path) as running:
        await running.supervisor.start()
        monkeypatch.setattr(Process, "start", failing)
        os.kill(process_in(await running.until_said("worker 2")), signal.SIGKILL)
        await running.until_said("worker 2 is ready again")
        assert not any(keeper.done() for keeper in running.supervisor._keepers)
    assert caplog.text.count("worker 2 cannot be started") == 3


async def test_a_start_without_descriptors_is_a_cluster_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(*_: Any) -> Process:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Process, "start", failing)
    async with cluster(tmp_path) as running:
        with pytest.raises(ClusterError, match=r"worker \d cannot be started .*ulimit -n"):
            await running.supervisor.start()


async def test_a_closed_standard_output_does_not_end_the_keeping(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        await running.supervisor.start()
        said, announce = list(running.said), running.supervisor._announce

        def broken(_: str) -> None:
            running.supervisor._announce = announce
            raise BrokenPipeError

        running.supervisor._announce = broken
        os.kill(process_in(said[0]), signal.SIGKILL)
        while running.supervisor._announce is broken:
            await asyncio.sleep(0.01)
        name = said[0].split(" of ")[0]
        os.kill(running.supervisor._processes[name].pid, signal.SIGKILL)
        await running.until_said(f"{name} is ready again")


async def test_nobody_can_take_the_port_of_a_worker_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour on the port would get the router's next requests, with prompts and keys."""
    may_start = asyncio.Event()

    async def start_later(*args: Any) -> Process:
        await may_start.wait()
        return await start(*args)

    start = Process.start
    with closing(HeldPort(LOOPBACK)) as held:
        async with cluster(tmp_path, held=held) as running:
            await running.supervisor.start()
            monkeypatch.setattr(Process, "start", start_later)
            os.kill(running.supervisor._processes["worker 1"].pid, signal.SIGKILL)
            await until_refused(held.port)
            assert is_taken(held.port)
            may_start.set()
            await running.until_said("worker 1 is ready again")
            assert await answers(held.port)
        await until_refused(held.port)
        assert is_taken(held.port)
