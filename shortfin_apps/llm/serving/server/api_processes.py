"""Starts, restarts and stops the processes that answer HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shortfin_apps.llm.restart_delay import RestartDelay
from shortfin_apps.llm.serving.engine_link.api_link import ApiLink
from shortfin_apps.llm.serving.engine_link.api_links import ApiLinks
from shortfin_apps.llm.serving.server.api_process import ApiProcessOptions
from shortfin_apps.llm.serving.server.config import ServerConfigError

logger = logging.getLogger(__name__)

LAST_S = 5.0  # maximum lifetime of a process after it loses its connection to the engine
HURRY_S = 2.0  # maximum time for a process to end after the second signal


class ApiProcesses:
    """Keeps `count` API processes running, which share the socket `listener`; `links` connects to each.

    `command` starts a process: two file descriptors are appended as arguments, and the process reads
    `options` from standard input (`api_process.py`).
    """

    def __init__(
        self,
        links: ApiLinks,
        listener: socket.socket,
        command: Sequence[str],
        options: ApiProcessOptions,
        count: int,
    ) -> None:
        self._links = links
        self._listener = listener
        self._command = command
        self._options = options
        self._count = count
        self._running: set[Process] = set()
        self._keepers: list[asyncio.Task[None]] = []
        self._is_stopping = False
        self._hurried = asyncio.Event()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # never has a result

    async def start(self) -> None:
        """Start all processes; later, `failed` gets a ServerConfigError if one ends before it is prepared.

        Raises ServerConfigError if the system cannot start one.
        """
        started: list[tuple[Process, ApiLink]] = []
        # Waits for every start, even if one fails, so that `until_ended` knows every process.
        starting = [self._start_one() for _ in range(self._count)]
        for outcome in await asyncio.gather(*starting, return_exceptions=True):
            if isinstance(outcome, OSError):
                raise ServerConfigError(
                    f"API processes cannot be started ({outcome}); raise the limits (`ulimit -n`,"
                    " `ulimit -u`), free memory or lower --api-processes"
                ) from outcome
            if isinstance(outcome, BaseException):
                raise outcome
            started.append(outcome)
        self._keepers = [
            asyncio.create_task(self._keep(index, *each)) for index, each in enumerate(started, 1)
        ]

    def signal(self) -> None:
        """Let the processes finish their requests; a second call stops them at once."""
        if self._is_stopping:
            self._hurried.set()
        self._is_stopping = True
        for process in self._running:
            _ask_to_end(process)

    async def until_ended(self, patience_s: float) -> None:
        """Wait until the signalled processes have ended, and kill the late ones.

        Processes have `patience_s` to end, but only HURRY_S after a second signal.
        """
        for keeper in self._keepers:
            keeper.cancel()
        waiting = [asyncio.create_task(process.wait()) for process in self._running]
        if not waiting:
            return
        either: list[asyncio.Future[Any]] = [
            ended := asyncio.gather(*waiting),
            hurried := asyncio.create_task(self._hurried.wait()),
        ]
        await asyncio.wait(either, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        if hurried.done():
            await asyncio.wait([ended], timeout=HURRY_S)
        hurried.cancel()
        if late := [task for task in waiting if not task.done()]:
            logger.warning("%d API processes did not end in time and are killed", len(late))
        for process in self._running:
            _send(process, signal.SIGKILL)
        await ended

    async def _keep(self, index: int, process: Process, link: ApiLink) -> None:
        clock, delay = asyncio.get_running_loop().time, RestartDelay()
        while True:
            began_s = clock()
            await self._until_gone(process, link)
            if self._is_stopping:
                return
            if not link.was_prepared and not self._is_serving:
                self._fail(index)
                return
            wait_s = delay.after(clock() - began_s)
            logger.warning(
                "API process %d has ended (%s); starting it again%s",
                index,
                _how(process),
                f" in {wait_s:g} s" if wait_s else "",
            )
            await asyncio.sleep(wait_s)
            process, link = await self._start_again(index, delay)

    async def _start_again(self, index: int, delay: RestartDelay) -> tuple[Process, ApiLink]:
        """Retry until a process starts: descriptors, processes or memory may be exhausted for a while."""
        while True:
            try:
                return await self._start_one()
            except Exception as error:
                wait_s = delay.after(0.0)
                is_bug = not isinstance(error, OSError)
                logger.error(
                    "API process %d cannot be started (%s); trying again in %g s",
                    *(index, error, wait_s),
                    exc_info=is_bug,
                )
            await asyncio.sleep(wait_s)

    @property
    def _is_serving(self) -> bool:
        return self._links.is_serving

    def _fail(self, index: int) -> None:
        if not self.failed.done():
            error = ServerConfigError(f"API process {index} could not start; the lines above say why")
            self.failed.set_exception(error)

    async def _until_gone(self, process: Process, link: ApiLink) -> None:
        await link.lost.wait()
        try:
            await asyncio.wait_for(process.wait(), LAST_S)
        except TimeoutError:
            _send(process, signal.SIGKILL)
            await process.wait()
        self._running.discard(process)

    async def _start_one(self) -> tuple[Process, ApiLink]:
        """Start a process and open its link. If this fails, kill the process and raise, e.g. OSError."""
        ours, theirs = socket.socketpair()
        process: Process | None = None
        try:
            with theirs:
                process = await self._spawn(theirs)
            self._running.add(process)
            if self._is_stopping:  # signalled meanwhile
                _ask_to_end(process)
            await self._tell_options(process)
            return process, await self._links.open(ours)
        except BaseException:
            ours.close()
            if process is not None:
                _send(process, signal.SIGKILL)
                await process.wait()
                self._running.discard(process)
            raise

    async def _spawn(self, theirs: socket.socket) -> Process:
        fds = (self._listener.fileno(), theirs.fileno())
        return await asyncio.create_subprocess_exec(
            *self._command,
            *map(str, fds),
            stdin=PIPE,
            stdout=DEVNULL,
            pass_fds=fds,
            start_new_session=True,  # Ctrl-C must reach only this process, which stops the others in order
        )

    async def _tell_options(self, process: Process) -> None:
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # the process has ended; its log has the reason
            process.stdin.write(self._current_options().to_json())
            await process.stdin.drain()
        process.stdin.close()

    def _current_options(self) -> ApiProcessOptions:
        """Return the options with the current log level."""
        level = logging.getLevelName(logging.getLogger().level).lower()
        config = self._options.config.changed(log_level=level)
        return replace(self._options, config=config, replaces=self._is_serving)


def api_process_command(module: str) -> list[str]:
    return [sys.executable, "-m", module]


def _ask_to_end(process: Process) -> None:
    """Ask a process to end. A stopped one (SIGSTOP) also needs SIGCONT; systemd sends both, too."""
    _send(process, signal.SIGTERM)
    _send(process, signal.SIGCONT)


def _send(process: Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def _how(process: Process) -> str:
    status = process.returncode
    return f"signal {-status}" if status is not None and status < 0 else f"status {status}"
