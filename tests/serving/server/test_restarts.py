"""The supervisor over real processes, which are scripts in place of the server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from shortfin_apps.llm.restart_delay import RestartDelay
from shortfin_apps.llm.serving.server import restarts
from shortfin_apps.llm.serving.server.restarts import MAX_LOSSES, Restarts
from shortfin_apps.llm.serving.server.start_up import EXIT_DEVICE_LOST

# `begin` is a process's number, from 1; `say` writes a sign of life.
PREAMBLE = """
import os, signal, sys, threading
listener, signs = int(sys.argv[-2]), int(sys.argv[-1])
options = sys.stdin.read()
folder = sys.argv[1]
number = len(os.listdir(folder)) + 1
open(os.path.join(folder, str(number)), "w").write(options)
say = lambda sign: os.write(signs, sign)
"""


class NoDelay(RestartDelay):
    def after(self, ran_s: float) -> float:
        return 0.0


@contextlib.asynccontextmanager
async def supervised(tmp_path: Path, script: str, **more: float) -> AsyncIterator[asyncio.Task[int]]:
    command = [sys.executable, "-c", PREAMBLE + script, str(tmp_path)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = asyncio.create_task(
            Restarts(command, b"the options", listener, delay=NoDelay(), **more).run()
        )
        try:
            yield running
        finally:
            running.cancel()


async def status_of(tmp_path: Path, script: str, **more: float) -> int:
    async with supervised(tmp_path, script, **more) as running:
        return await running


def num_started(tmp_path: Path) -> int:
    return len(list(tmp_path.iterdir()))


@pytest.mark.parametrize("status", [0, 1, 2])
async def test_a_server_that_ends_for_another_reason_is_not_started_again(
    tmp_path: Path, status: int
) -> None:
    assert await status_of(tmp_path, f"sys.exit({status})") == status
    assert num_started(tmp_path) == 1
    assert (tmp_path / "1").read_text() == "the options"


@pytest.mark.parametrize(
    "loss",
    ["os._exit(75)", "say(b'x'); os._exit(75)", "os.kill(os.getpid(), signal.SIGSEGV)", "os.abort()"],
    ids=["status", "told", "crash", "abort"],
)
async def test_a_lost_server_is_started_again(tmp_path: Path, loss: str) -> None:
    assert await status_of(tmp_path, f"say(b's')\nif number < 4: {loss}") == 0
    assert num_started(tmp_path) == 4


async def test_a_server_that_is_always_lost_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert await status_of(tmp_path, "say(b's'); os._exit(75)") == EXIT_DEVICE_LOST
    assert num_started(tmp_path) == MAX_LOSSES + 1
    assert "giving up" in caplog.text


async def test_a_driver_without_a_gpu_for_a_while_is_tried_again(tmp_path: Path) -> None:
    script = "if number == 1: say(b's'); os._exit(75)\nif number < 4: sys.exit(2)"
    assert await status_of(tmp_path, script) == 0
    assert num_started(tmp_path) == 4


async def test_losses_of_servers_that_have_served_for_long_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "STABLE_S", 0.0)
    script = f"say(b's')\nif number < {MAX_LOSSES + 4}: os._exit(75)"
    assert await status_of(tmp_path, script) == 0


async def test_a_process_that_tells_its_loss_but_does_not_end_is_killed(tmp_path: Path) -> None:
    script = "if number == 1: say(b'x'); threading.Event().wait()"
    assert await status_of(tmp_path, script, max_exit_s=0.05) == 0
    assert num_started(tmp_path) == 2


async def test_a_serving_process_that_falls_silent_is_killed(tmp_path: Path) -> None:
    script = "if number == 1: say(b's'); threading.Event().wait()"
    assert await status_of(tmp_path, script, max_silence_s=0.05) == 0
    assert num_started(tmp_path) == 2


async def test_a_process_that_loads_in_silence_for_too_long_is_killed(tmp_path: Path) -> None:
    script = "if number == 1: say(b'l'); threading.Event().wait()"
    assert await status_of(tmp_path, script, max_loading_silence_s=4.0) == 0
    assert num_started(tmp_path) == 2


async def test_a_process_may_load_in_silence(tmp_path: Path) -> None:
    """Its parameters may take minutes, during which Python's lock is held."""
    script = """
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
say(b"l")
open(folder + "/ready", "w")
threading.Event().wait()
"""
    async with supervised(tmp_path, script, max_silence_s=0.0) as running:
        await until(lambda: (tmp_path / "ready").exists())
        done, _ = await asyncio.wait({running}, timeout=2 * restarts.CHECK_S)
        assert not done
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_stop_reaches_the_server_once_and_ends_it_for_good(tmp_path: Path, number: int) -> None:
    script = """
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
open(folder + "/ready", "w")
threading.Event().wait()
"""
    async with supervised(tmp_path, script) as running:
        await until(lambda: (tmp_path / "ready").exists())
        os.kill(os.getpid(), number)
        assert await running == EXIT_DEVICE_LOST
    assert num_started(tmp_path) == 2


async def test_a_stop_kills_a_process_that_loads_in_silence(tmp_path: Path) -> None:
    """It is in a driver's call that holds Python's lock, so it handles no signal."""
    script = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(folder + "/ready", "w")
threading.Event().wait()
"""
    async with supervised(tmp_path, script, max_exit_s=0.05) as running:
        await until(lambda: (tmp_path / "ready").exists())
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running == 128 + signal.SIGKILL


async def test_a_stop_between_two_servers_ends_the_supervisor(tmp_path: Path) -> None:
    class Long(RestartDelay):
        def after(self, ran_s: float) -> float:
            os.kill(os.getpid(), signal.SIGTERM)
            return 1000.0

    command = [sys.executable, "-c", PREAMBLE + "os._exit(75)", str(tmp_path)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert await Restarts(command, b"", listener, delay=Long()).run() == 0
    assert num_started(tmp_path) == 1


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)
