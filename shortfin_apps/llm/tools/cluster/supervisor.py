"""Starts workers, then the router; restarts processes that end; stops the router, then the workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shortfin_apps.llm.contract.errors import LlmError
from shortfin_apps.llm.restart_delay import RestartDelay
from shortfin_apps.llm.serving.server.config import ENV_PREFIX
from shortfin_apps.llm.serving.server.config_sources import OTHER_VARIABLES
from shortfin_apps.llm.tools.cluster.ports import HeldPort

TAIL_LINES = 15
MAX_LINE_BYTES = 1 << 20
COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # routers write colours even to a pipe

Show = Callable[[str, str], None]  # receives a process's name and a line of its log


@dataclass(frozen=True, slots=True)
class Program:
    """A command: `python -m` followed by `words`. It gets `stdin` as JSON on stdin, hidden from other users.

    `port` is inherited by the process; connections to it are refused while the program does not run.
    """

    name: str
    words: Sequence[str]
    stdin: Any
    logs_to_stdout: bool = False  # otherwise standard output is discarded
    port: HeldPort | None = None


class Process:
    """A running program. It receives SIGTERM when this (the supervising) process ends for any reason."""

    def __init__(self, program: Program, process: asyncio.subprocess.Process, show: Show) -> None:
        self.program = program
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process = process
        self._show = show
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, program: Program, show: Show) -> Process:
        output = asyncio.subprocess.STDOUT if program.logs_to_stdout else asyncio.subprocess.PIPE
        child = "shortfin_apps.llm.tools.cluster.child"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", child, str(os.getpid()), *program.words),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE if program.logs_to_stdout else asyncio.subprocess.DEVNULL,
            stderr=output,
            limit=MAX_LINE_BYTES,
            pass_fds=() if program.port is None else program.port.fds,
            start_new_session=True,  # Ctrl-C must reach only this process, which stops the others in order
            env=_environment(),
        )
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # the program has ended, and its log has the reason
            process.stdin.write(json.dumps(program.stdin).encode())
            await process.stdin.drain()
        process.stdin.close()
        return cls(program, process, show)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Wait for the process and the end of its log; return its exit status, negative for a signal."""
        status = await self._process.wait()
        if self.program.port is not None:
            self.program.port.refuse()
        # A child that the process left running may hold the log open.
        await asyncio.wait({self._reading}, timeout=1)
        return status

    async def stop(self, patience_s: float) -> None:
        """Send SIGTERM, and SIGKILL if the process has not ended after `patience_s`; wait for its end."""
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # a stopped process (SIGSTOP) handles SIGTERM only once it continues
        try:
            await asyncio.wait_for(self.wait(), patience_s)
        except TimeoutError:
            self.kill()
            await self.wait()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def _read(self) -> None:
        stream = self._process.stdout if self.program.logs_to_stdout else self._process.stderr
        assert stream is not None
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # a line longer than MAX_LINE_BYTES is dropped
                continue
            if not line:
                return
            text = COLOUR.sub("", line.decode(errors="replace")).rstrip()
            self.tail.append(text)
            with contextlib.suppress(OSError, ValueError):  # read on if our log is closed: a full pipe blocks
                self._show(self.program.name, text)


def _environment() -> dict[str, str]:
    """Return this process's environment without settings of `serve`, which programs get on stdin."""
    kept = {ENV_PREFIX + name for name in OTHER_VARIABLES}
    return {
        name: value
        for name, value in os.environ.items()
        if not name.upper().startswith(ENV_PREFIX) or name.upper() in kept
    }


logger = logging.getLogger(__name__)

POLL_S = 0.1
PROBE_TIMEOUT_S = 5.0
LATE_S = 1.0  # if a timeout fires later than this, the process was suspended (SIGSTOP, sleep)
MARGIN_S = 10.0  # added to the drain time before SIGKILL


class ClusterError(LlmError):
    """A process of a cluster did not start."""


@dataclass(frozen=True, slots=True)
class Member:
    """A program, and the URL that answers 200 once the program is ready."""

    program: Program
    ready_url: str


class Supervisor:
    """Starts, restarts and stops a cluster's processes.

    `announce` is called with a message when a process is ready, `show` with each line of a process's log.
    """

    def __init__(
        self,
        workers: Sequence[Member],
        router: Member,
        *,
        start_timeout_s: float,
        drain_s: float,
        announce: Callable[[str], None],
        show: Show,
    ) -> None:
        self._workers, self._router = workers, router
        self._start_timeout_s = start_timeout_s
        self._drain_s = drain_s
        self._announce, self._show = announce, show
        self._processes: dict[str, Process] = {}  # running processes by program name
        self._keepers: list[asyncio.Task[None]] = []
        self._clock = asyncio.get_running_loop().time

    async def start(self) -> None:
        """Start all workers, then the router; return once all are ready. Raises ClusterError."""
        try:
            async with asyncio.TaskGroup() as starting:
                for number, worker in enumerate(self._workers, 1):
                    starting.create_task(self._start_worker(worker, f"{number} of {len(self._workers)}"))
        except* ClusterError as failures:
            raise failures.exceptions[0] from None
        await self._start_member(self._router)
        members = (*self._workers, self._router)
        self._keepers = [asyncio.create_task(self._keep(member)) for member in members]

    async def stop(self) -> None:
        """Drain and stop the router, then the workers, so that requests in progress are completed.

        Each of these two steps has the drain time plus MARGIN_S. Processes that need longer are killed.
        """
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await self._stop([self._router])
        await self._stop(self._workers)

    def kill(self) -> None:
        """Kill all remaining processes, so that a running `stop` returns."""
        for process in self._processes.values():
            process.kill()

    async def _stop(self, members: Sequence[Member]) -> None:
        names = {member.program.name for member in members} & self._processes.keys()
        patience_s = self._drain_s + MARGIN_S
        await asyncio.gather(*(self._processes[name].stop(patience_s) for name in names))

    async def _start_worker(self, worker: Member, which: str) -> None:
        process = await self._start_member(worker)
        url = worker.ready_url.rpartition("/")[0]
        self._announce(f"worker {which} is ready (process {process.pid}, {url})")

    async def _start_member(self, member: Member) -> Process:
        """Start a process and wait until it is ready.

        Raises ClusterError with the last log lines if the process ends or is not ready in time.
        """
        name = member.program.name
        try:
            process = await self._run(member)
        except OSError as error:
            raise ClusterError(
                f"{name} cannot be started ({error}); raise the limits (`ulimit -n`, `ulimit -u`), free"
                " memory or lower --workers"
            ) from error
        async with _ready_or_ended(member, process) as (ready, ended):
            await self._until_first(ended, ready)
            if ended.done():
                raise ClusterError(f"{name} ended with {_status(ended.result())}{_tail(process)}")
            if not ready.done():
                late = f"was not ready within {self._start_timeout_s:g} s (--start-timeout)"
                raise ClusterError(f"{name} {late}{_tail(process)}")
            ready.result()
        return process

    async def _until_first(self, *tasks: asyncio.Task[Any]) -> None:
        """Wait until a task is done or the start timeout has passed.

        The timeout starts anew if this process was suspended meanwhile.
        """
        timeout_s = self._start_timeout_s
        while True:
            due_s = self._clock() + timeout_s
            done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if done or self._clock() - due_s < LATE_S:
                return

    async def _run(self, member: Member) -> Process:
        process = await Process.start(member.program, self._show)
        self._processes[member.program.name] = process
        return process

    async def _keep(self, member: Member) -> None:
        """Restart the member whenever it ends."""
        name, delay = member.program.name, RestartDelay()
        started_s = self._clock()
        while True:
            status = await self._processes[name].wait()
            wait_s = delay.after(self._clock() - started_s)
            logger.warning("%s ended with %s; it is started again in %g s", name, _status(status), wait_s)
            await asyncio.sleep(wait_s)
            started_s = self._clock()
            process = await self._run_again(member, delay)
            try:
                await self._announce_ready_again(member, process)
            except Exception:  # keep supervising the process even if the probe or the announcement fails
                logger.exception("%s was started again, but it is not known whether it is ready", name)

    async def _run_again(self, member: Member, delay: RestartDelay) -> Process:
        """Start the process; retry on errors, as file descriptors or memory may be exhausted for a while."""
        while True:
            try:
                return await self._run(member)
            except Exception as error:
                wait_s = delay.after(0.0)
                logger.error(
                    "%s cannot be started (%s); trying again in %g s",
                    *(member.program.name, error, wait_s),
                    exc_info=not isinstance(error, OSError),
                )
            await asyncio.sleep(wait_s)

    async def _announce_ready_again(self, member: Member, process: Process) -> None:
        """Wait until the process is ready or has ended; announce it if it is ready."""
        async with _ready_or_ended(member, process) as (ready, ended):
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                ready.result()
                self._announce(f"{member.program.name} is ready again (process {process.pid})")


@contextlib.asynccontextmanager
async def _ready_or_ended(
    member: Member, process: Process
) -> AsyncIterator[tuple[asyncio.Task[None], asyncio.Task[int]]]:
    """Yield two tasks: one is done once the process is ready, the other once the process has ended."""
    ready = asyncio.create_task(_until_ready(member.ready_url))
    ended = asyncio.create_task(process.wait())
    try:
        yield ready, ended
    finally:
        ready.cancel()
        ended.cancel()


async def _until_ready(url: str) -> None:
    """Wait until `url` answers 200."""
    import httpx  # of an extra

    # The process is on this machine: no proxy is needed, and its certificate may be for another host name.
    async with httpx.AsyncClient(timeout=PROBE_TIMEOUT_S, trust_env=False, verify=False) as client:
        while True:
            try:
                if (await client.get(url)).status_code == 200:
                    return
            except httpx.HTTPError:
                pass  # not listening yet
            await asyncio.sleep(POLL_S)


def _status(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"status {status}"


def _tail(process: Process) -> str:
    lines = "\n".join(f"  {line}" for line in process.tail)
    return f"; the last lines of its log:\n{lines}" if lines else ", and logged nothing"
