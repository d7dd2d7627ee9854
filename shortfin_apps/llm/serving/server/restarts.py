"""Starts the server again after it has lost its device (`--restart-on-device-loss`).

This process has the port's socket and the settings, and loads no driver, which would hold its device. The
server is a child process (`supervised.py`), because only a new process can use a driver again after a
failure. Clients that connect between two servers wait in the socket's queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shortfin_apps.llm.restart_delay import STABLE_S, RestartDelay
from shortfin_apps.llm.serving.server.config import ServerConfig, plain
from shortfin_apps.llm.serving.server.life_signs import LOST, SERVING
from shortfin_apps.llm.serving.server.start_up import EXIT_DEVICE_LOST, EXIT_OK

logger = logging.getLogger(__name__)

MAX_LOSSES = 8  # in a row, each before the server has served for STABLE_S: with delays of 91 s together
# Of a serving process: a driver's call holds Python's lock if it takes longer. While a model is loaded, the
# call that reads its parameters holds the lock, perhaps from a slow disk.
MAX_SILENCE_S, MAX_LOADING_SILENCE_S = 30.0, 1800.0
CHECK_S = 1.0
MAX_EXIT_S = 10.0  # for a process to end after it is lost, and again after SIGKILL
MODULE = "shortfin_apps.llm.serving.server.supervised"
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a server process ended: its status (negative for a signal, None if it did not end).

    `is_lost`: its device is lost, or its driver has ended it. `served_s`: for how long it served.
    """

    status: int | None
    is_lost: bool
    served_s: float


def keep_serving(config: ServerConfig, listener: socket.socket) -> int:
    """Serve until a signal; return the exit status. Callers must be in the main thread."""
    restarts = Restarts([sys.executable, "-m", MODULE], options_of(config), listener)
    return asyncio.run(restarts.run())


def options_of(config: ServerConfig) -> bytes:
    """Serialise the settings, including secrets, as `supervised.py` reads them."""
    return json.dumps([config.given, config.source], default=plain).encode()


class Restarts:
    """Keeps one server process running on `listener`. `command` starts it; it reads `options` from stdin."""

    def __init__(
        self,
        command: Sequence[str],
        options: bytes,
        listener: socket.socket,
        *,
        max_silence_s: float = MAX_SILENCE_S,
        max_loading_silence_s: float = MAX_LOADING_SILENCE_S,
        max_exit_s: float = MAX_EXIT_S,
        delay: RestartDelay | None = None,
    ) -> None:
        self._command = command
        self._options = options
        self._listener = listener
        self._max_silence_s = max_silence_s
        self._max_loading_silence_s = max_loading_silence_s
        self._max_exit_s = max_exit_s
        self._delay = delay or RestartDelay()
        self._process: Process | None = None
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        """Run servers until one ends in order, or until MAX_LOSSES in a row; return the exit status."""
        loop = asyncio.get_running_loop()
        for number in FORWARDED:
            loop.add_signal_handler(number, self._on_signal, number)
        num_losses = 0
        while not self._stopping.is_set():
            ended = await self._run_one()
            # After a loss, the driver may have no GPU for a while, which a start refuses as a wrong setting.
            was_refused = num_losses > 0 and not ended.served_s and ended.status != EXIT_OK
            if not (ended.is_lost or was_refused) or self._stopping.is_set():
                return _exit_status(ended)
            num_losses = 1 if ended.served_s >= STABLE_S else num_losses + 1
            if num_losses > MAX_LOSSES:
                logger.critical("the device was lost %d times in a row; giving up", num_losses)
                return EXIT_DEVICE_LOST
            wait_s = self._delay.after(ended.served_s)
            logger.error(
                "the server has lost its device (%s); starting it again in %g s, try %d of %d",
                *(_how(ended), wait_s, num_losses, MAX_LOSSES),
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait_s)
        return EXIT_OK

    def _on_signal(self, number: int) -> None:
        """Forward a signal. Ctrl-C reaches this process alone, as the server has a session of its own."""
        is_stop = number != signal.SIGUSR1
        if is_stop:
            self._stopping.set()
        _send(self._process, signal.SIGTERM if is_stop else number)
        if is_stop:
            _send(self._process, signal.SIGCONT)

    async def _run_one(self) -> Ended:
        loop = asyncio.get_running_loop()
        signs, theirs = os.pipe()
        os.set_blocking(signs, False)
        try:
            process = await self._start(theirs)
        except OSError as error:  # no descriptors, processes or memory are left, for a while
            logger.error("the server cannot be started (%s)", error)
            os.close(signs)
            return Ended(None, is_lost=True, served_s=0.0)
        finally:
            os.close(theirs)
        watch = _Watch(signs)
        loop.add_reader(signs, watch.read)
        try:
            return await self._until_ended(process, watch)
        finally:
            loop.remove_reader(signs)
            os.close(signs)

    async def _start(self, signs: int) -> Process:
        fds = (self._listener.fileno(), signs)
        process = await asyncio.create_subprocess_exec(
            *self._command, *map(str, fds), stdin=PIPE, pass_fds=fds, start_new_session=True
        )
        self._process = process
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # the process has ended; its log has the reason
            process.stdin.write(self._options)
            await process.stdin.drain()
        process.stdin.close()
        if self._stopping.is_set():  # signalled meanwhile
            _send(process, signal.SIGTERM)
        return process

    async def _until_ended(self, process: Process, watch: _Watch) -> Ended:
        clock = asyncio.get_running_loop().time
        ended = asyncio.ensure_future(process.wait())
        either: list[asyncio.Future[Any]] = [ended, watch.lost]
        checked_s = clock()
        while not (ended.done() or watch.is_lost):
            await asyncio.wait(either, timeout=CHECK_S, return_when=asyncio.FIRST_COMPLETED)
            now_s = clock()
            if now_s - checked_s > 2 * CHECK_S:  # this process was suspended
                watch.heard_s = now_s
            checked_s = now_s
            if now_s - watch.heard_s > self._most_silence_s(watch) and not _is_stopped(process.pid):
                silence_s = now_s - watch.heard_s
                logger.error("the server has not run for %.0f s: a driver's call holds it", silence_s)
                _send(process, signal.SIGKILL)
                watch.lose()
        if watch.is_lost:
            await self._finish(process, ended)
        watch.read()
        status = ended.result() if ended.done() else None
        is_lost = watch.is_lost or status is None or status == EXIT_DEVICE_LOST or status < 0
        return Ended(status, is_lost, watch.served_s(clock()))

    def _most_silence_s(self, watch: _Watch) -> float:
        if self._stopping.is_set():  # its handler of signals runs in Python, too
            return min(self._max_exit_s, self._max_silence_s)
        return self._max_silence_s if watch.serves else self._max_loading_silence_s

    async def _finish(self, process: Process, ended: asyncio.Future[int]) -> None:
        """Wait for a process without a device to end; kill it, and go on without it if that does not help."""
        for number in (signal.SIGKILL, None):
            await asyncio.wait({ended}, timeout=self._max_exit_s)
            if ended.done():
                return
            if number is not None:
                _send(process, number)
        logger.error("the process %d does not end even when killed; going on without it", process.pid)
        ended.cancel()


class _Watch:
    """Signs of life of one process, read from a pipe."""

    def __init__(self, descriptor: int) -> None:
        self._clock = asyncio.get_running_loop().time
        self.heard_s = self._clock()
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._descriptor = descriptor
        self._serving_since_s: float | None = None

    @property
    def is_lost(self) -> bool:
        return self.lost.done()

    def read(self) -> None:
        """Read the signs that have come; at the pipe's end, stop reading."""
        try:
            signs = os.read(self._descriptor, 4096)
        except BlockingIOError:
            return
        if not signs:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            return
        self.heard_s = self._clock()
        if SERVING in signs and self._serving_since_s is None:
            self._serving_since_s = self.heard_s
        if LOST in signs:
            self.lose()

    def lose(self) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    @property
    def serves(self) -> bool:
        return self._serving_since_s is not None

    def served_s(self, now_s: float) -> float:
        return 0.0 if self._serving_since_s is None else now_s - self._serving_since_s


def _is_stopped(pid: int) -> bool:
    """Whether the process is stopped (SIGSTOP, a debugger), which is no fault of its device."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] in ("T", "t")
    except OSError:
        return False


def _send(process: Process | None, number: int) -> None:
    """Send a signal. `Process.send_signal` would take the exit status from the event loop in a race."""
    if process is not None and process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _exit_status(ended: Ended) -> int:
    """Return the status with which this process ends, as a shell reports a signal's."""
    if ended.status is None:
        return EXIT_DEVICE_LOST
    return ended.status if ended.status >= 0 else 128 - ended.status


def _how(ended: Ended) -> str:
    if ended.status is None:
        return "no process"
    return f"signal {-ended.status}" if ended.status < 0 else f"status {ended.status}"
