"""A process for work that may not terminate, each item in a worker that is killed at its limits.

Grammars and chat templates are untrusted programs, and the libraries that run them cannot be interrupted.
Therefore the server starts this process, which imports the library once and forks workers. The kernel ends a
worker when a work item has used up its time or memory, or when the server closes the connection or dies.

The process has one of the server's sockets. Each byte on it comes with one end of a connection for a new
worker, and of a lifeline. Over the connection the server sends a work item as a line of JSON. The worker
answers with two lines and waits for the next item:

    null        the work has started: if the connection ends before the next line, a limit was reached
    result      as JSON

The process ends when the server closes its socket, a worker when its connection and its lifeline are closed.
Nothing is sent over a lifeline, because the kernel uses the same signal for closing and for data: it may
still signal the data of a line while the worker already works on it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

NUM_ANSWERS = 2  # answers of a worker to a work item
BEGUN = b"null\n"
STACK_BYTES = 64 << 20
LINE_BUFFER_BYTES = 1 << 16
PART_BYTES = 1 << 18
LATE_S = 1.0  # tolerance of the wall-clock limit on a busy machine
SLACK_S = 5.0  # extra time for answers: the process may have to start and fork first

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

Work = Callable[[bytes], object]
"""The function that a worker applies to a line; it returns a JSON value."""

Answers = list[Any]
"""A worker's answers: both; only the first if the work reached a limit; none if its state is unknown."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits per work item: seconds of processor and wall-clock time, and bytes beyond the process's own."""

    cpu_s: float
    wall_s: float
    memory_bytes: int = 512 << 20

    @property
    def patience_s(self) -> float:
        """Maximum time for the answers to a work item."""
        return self.wall_s + SLACK_S


class LimitedProcess:
    """The server's end: owns the process. Raises OSError if none can be started."""

    def __init__(self, module: str, *arguments: object, text: str = "") -> None:
        """Starts `python -m module FD ARGUMENTS < text`, which calls `serve`; the arguments are JSON.

        Returns before the process has read the text.
        """
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        with tempfile.TemporaryFile() as file, theirs:
            file.write(text.encode())
            file.seek(0)
            given = [json.dumps(value) for value in (theirs.fileno(), *arguments)]
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *given],
                stdin=file,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # libraries write there which part of a request they failed on
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the server
            )
        self.close = weakref.finalize(self, _end, self.process, self._control)

    @property
    def is_over(self) -> bool:
        """True if the process has ended, so that there are no new workers."""
        return self.process.poll() is not None

    def new_worker(self) -> socket.socket:
        """Connects to a new worker. Raises OSError if the process has ended, or too many wait for it."""
        ours, theirs = _Connection.pair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"+"], theirs.filenos())
        except OSError:
            ours.close()
            raise
        return ours


class _Connection(socket.socket):
    """One end of a connection to a worker, and of its lifeline."""

    def __init__(self, fileno: int, lifeline: socket.socket) -> None:
        super().__init__(fileno=fileno)
        self.lifeline = lifeline

    @classmethod
    def pair(cls) -> tuple[_Connection, _Connection]:
        """Returns both ends. Raises OSError if there are no more file descriptors."""
        connections = socket.socketpair()
        try:
            lifelines = socket.socketpair()
        except OSError:
            for each in connections:
                each.close()
            raise
        ours, theirs = (cls(c.detach(), line) for c, line in zip(connections, lifelines, strict=True))
        return ours, theirs

    def filenos(self) -> list[int]:
        return [self.fileno(), self.lifeline.fileno()]

    def close(self) -> None:
        """Closes the lifeline last: a worker that starts on a line then notices either."""
        super().close()
        self.lifeline.close()


class Workers:
    """Exchanges work with workers, and keeps idle workers, which end with this object.

    `begin` connects to another worker. It is called if an idle worker returns nothing about the work because
    it was suspended or has ended. An OSError of `begin` means no answer; other errors are raised.
    """

    def __init__(self, purpose: str, limits: Limits, clock: Clock = time.monotonic) -> None:
        self._purpose, self._limits, self._clock = purpose, limits, clock
        self.idle: list[socket.socket] = []
        self.close = weakref.finalize(self, _close, self.idle)

    def ask(self, work: bytes, begin: Callable[[], socket.socket]) -> Answers:
        """Returns the answers to a line of JSON. For threads: each uses a separate worker."""
        for worker in self._candidates(begin):
            if answers := self.exchange(worker, work):
                return self._kept(worker, answers)
        return []

    async def ask_in_loop(self, work: bytes, begin: Callable[[], socket.socket]) -> Answers:
        """Like `ask`, for an event loop. Cancelling a call ends its worker."""
        import asyncio  # not at module level: the process, which imports this file too, starts faster without

        loop = asyncio.get_running_loop()
        for worker in self._candidates(begin):
            worker.setblocking(False)
            with _Exchange(worker, self._limits, self._clock) as exchange:
                async with asyncio.timeout(self._limits.patience_s):
                    await loop.sock_sendall(worker, work)
                    while exchange.wants_more(await loop.sock_recv(worker, PART_BYTES)):
                        pass
            if exchange.answers:
                return self._kept(worker, exchange.answers)
        return []

    def exchange(self, worker: socket.socket, work: bytes) -> Answers:
        """Returns the answers of this worker, and ends it unless it gives both."""
        worker.settimeout(self._limits.patience_s)
        with _Exchange(worker, self._limits, self._clock) as exchange:
            worker.sendall(work)
            while exchange.wants_more(worker.recv(PART_BYTES)):
                pass
        return exchange.answers

    def _candidates(self, begin: Callable[[], socket.socket]) -> Iterator[socket.socket]:
        with suppress(IndexError):
            yield self.idle.pop()
        try:
            yield begin()
        except OSError as error:  # no more processes or files, too many wait for the process, or it has ended
            logger.warning("%s: no worker can be started: %s", self._purpose, error)

    def _kept(self, worker: socket.socket, answers: Answers) -> Answers:
        if len(answers) == NUM_ANSWERS:
            self.idle.append(worker)
        return answers


class _Exchange:
    """A worker's response to a work item. Sets `answers` on exit, and ends the worker unless it gave both."""

    answers: Answers

    def __init__(self, worker: socket.socket, limits: Limits, clock: Clock) -> None:
        self._worker, self._limits, self._clock = worker, limits, clock
        self._received, self._num_lines = [b""], 0
        self._asked_s = self._begun_s = clock()

    def __enter__(self) -> _Exchange:
        return self

    def wants_more(self, part: bytes) -> bool:
        """Adds received data, empty if the worker has ended; returns True if more is expected."""
        if not self._num_lines:
            self._begun_s = self._clock()
        self._received.append(part)
        self._num_lines += part.count(b"\n")
        return bool(part) and self._num_lines < NUM_ANSWERS

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.answers = [json.loads(line) for line in b"".join(self._received).split(b"\n")[:-1]]
        if error is not None or len(self.answers) < NUM_ANSWERS:
            self._worker.close()
            if error is not None or self._was_suspended():
                self.answers = []
        return isinstance(error, BrokenPipeError | ConnectionResetError | TimeoutError)

    def _was_suspended(self) -> bool:
        """Returns True if the worker, or both sides before the first answer, may have been suspended."""
        now_s = self._clock()
        late = now_s - self._begun_s > self._limits.wall_s + LATE_S
        return late or now_s - self._asked_s > self._limits.patience_s


def arguments_of(limits: Limits) -> tuple[Any, ...]:
    """Converts limits to an argument of a LimitedProcess that `serve` accepts."""
    return astuple(limits)


def serve(control_fd: int, limits: Limits, begin: Callable[[], Work], stack_bytes: int = STACK_BYTES) -> None:
    """Runs the process; `begin` is called in each worker, on a stack of `stack_bytes`."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers leave no zombies
    with socket.socket(fileno=control_fd) as control:
        while connection := _next_connection(control):
            with connection:
                if os.fork() == 0:
                    control.close()
                    _live(connection, limits, begin, stack_bytes)


def _next_connection(control: socket.socket) -> _Connection | None:
    message, fds, _, _ = socket.recv_fds(control, 1, 2)
    return _Connection(fds[0], socket.socket(fileno=fds[1])) if message else None


def _live(connection: _Connection, limits: Limits, begin: Callable[[], Work], stack_bytes: int) -> None:
    """Runs a worker; never returns."""
    try:
        _end_when_closed(connection.lifeline)
        _limit_memory(stack_bytes + limits.memory_bytes)
        threading.stack_size(stack_bytes)
        worker = threading.Thread(target=_work_on_each, args=(connection, limits, begin()))
        worker.start()
        worker.join()
    finally:
        os._exit(0)


def _work_on_each(connection: socket.socket, limits: Limits, work: Work) -> None:
    for line in connection.makefile("rb", buffering=LINE_BUFFER_BYTES):
        _limit_time(limits.cpu_s, limits.wall_s)
        connection.sendall(BEGUN)
        result = work(line)
        _limit_time(0, 0)
        connection.sendall(json.dumps(result).encode() + b"\n")


def _limit_time(cpu_s: float, wall_s: float) -> None:
    """Sets timers with signals that end the process even inside a library; 0 means no limit."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def _limit_memory(num_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    allowed = pages * resource.getpagesize() + num_bytes
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY or allowed < soft:
        resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))


def _end_when_closed(lifeline: socket.socket) -> None:
    """Makes the kernel send SIGIO, which ends this process, when the other side closes its end."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    """Ends the process. Work in progress ends at its limits, or when its connection is closed."""
    control.close()
    process.kill()
    process.wait()


def _close(connections: list[socket.socket]) -> None:
    for each in connections:
        each.close()
