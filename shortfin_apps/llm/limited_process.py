"""A process that forks workers for work that may not terminate. The kernel kills a worker at its limits.

Grammars and chat templates are untrusted programs, and the libraries that run them cannot be interrupted.
Therefore the server starts this process, which imports such a library once and forks workers. The kernel ends
a worker when a work item exceeds its limit of time or memory, or when the server closes the worker's
connection or dies.

The server and the process share a control socket. To get a worker, the server sends one byte together with
the file descriptors of two sockets: the worker's ends of a connection and of a lifeline. Over the connection
the server sends a work item as a line of JSON. The worker answers with two lines, then waits for the next:

    null        the work has started: if the connection ends before the next line, a limit was reached
    result      as JSON

The process ends when the server closes the control socket. A worker ends when its connection and its lifeline
are closed. The kernel sends it a signal when the lifeline is closed. Nothing is sent over a lifeline, as the
kernel sends the same signal for data. (For the same reason, the connection cannot be used instead: a signal
for a line of data could arrive when the worker already works on this line, and would end it.)
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
SLACK_S = 5.0  # extra time for the answers, as the process may have to start and fork first

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

Work = Callable[[bytes], object]
"""The function that a worker applies to a work item (a line of JSON). It must return a JSON value."""

Answers = list[Any]
"""A worker's answers to a work item: usually two. Only the first (null) if a limit was reached.

Empty if it is unknown whether the work reached a limit, because the worker was suspended or had ended.
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits per work item: CPU time, wall-clock time, and memory beyond that of the process itself."""

    cpu_s: float
    wall_s: float
    memory_bytes: int = 512 << 20

    @property
    def patience_s(self) -> float:
        """The maximum time that the server waits for both answers to a work item."""
        return self.wall_s + SLACK_S


class LimitedProcess:
    """The server's side: starts and owns the process. Raises OSError if the process cannot be started."""

    def __init__(self, module: str, *arguments: object, text: str = "") -> None:
        """Start `python -m module FD ARGUMENTS < text`. The module must call `serve`; arguments are JSON.

        Returns before the process has read `text`.
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
                stderr=subprocess.DEVNULL,  # libraries may write parts of requests there
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C must reach only the server
            )
        self.close = weakref.finalize(self, _end, self.process, self._control)

    @property
    def is_over(self) -> bool:
        """Whether the process has ended, so that it forks no more workers."""
        return self.process.poll() is not None

    def new_worker(self) -> socket.socket:
        """Connect to a new worker. Raises OSError if the process has ended or has too many pending forks."""
        ours, theirs = _Connection.pair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"+"], theirs.filenos())
        except OSError:
            ours.close()
            raise
        return ours


class _Connection(socket.socket):
    """One end of the connection between server and worker, and the same side's end of the lifeline."""

    def __init__(self, fileno: int, lifeline: socket.socket) -> None:
        super().__init__(fileno=fileno)
        self.lifeline = lifeline

    @classmethod
    def pair(cls) -> tuple[_Connection, _Connection]:
        """Create a connection with a lifeline; return both ends. Raises OSError without file descriptors."""
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
        """Close the connection, then the lifeline: a worker about to read a line notices one or the other."""
        super().close()
        self.lifeline.close()


class Workers:
    """Sends work items to workers and keeps idle workers for reuse. The workers end with this object.

    `ask` and `ask_in_loop` use an idle worker, if there is one. If there is none, or if the worker gives no
    answers because it was suspended or has ended, `begin` is called, which must connect to another worker. An
    OSError raised by `begin` is logged, and the answers are empty; other errors are raised.
    """

    def __init__(self, purpose: str, limits: Limits, clock: Clock = time.monotonic) -> None:
        self._purpose, self._limits, self._clock = purpose, limits, clock
        self.idle: list[socket.socket] = []
        self.close = weakref.finalize(self, _close, self.idle)

    def ask(self, work: bytes, begin: Callable[[], socket.socket]) -> Answers:
        """Return the answers to a work item (a line of JSON). Blocks; several threads may call it at once."""
        for worker in self._candidates(begin):
            if answers := self.exchange(worker, work):
                return self._kept(worker, answers)
        return []

    async def ask_in_loop(self, work: bytes, begin: Callable[[], socket.socket]) -> Answers:
        """Return the answers like `ask`, for callers in an event loop. Cancellation ends the worker."""
        import asyncio  # imported here because the limited process, which imports this module, starts faster

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
        """Return the answers of `worker` to a work item; end the worker unless it gives both."""
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
        except OSError as error:  # out of processes or files, too many pending forks, or no process any more
            logger.warning("%s: no worker can be started: %s", self._purpose, error)

    def _kept(self, worker: socket.socket, answers: Answers) -> Answers:
        if len(answers) == NUM_ANSWERS:
            self.idle.append(worker)
        return answers


class _Exchange:
    """Collects a worker's answers to a work item, as a context manager.

    When the context exits, `answers` is set, and the worker is ended unless it gave both answers.
    """

    answers: Answers

    def __init__(self, worker: socket.socket, limits: Limits, clock: Clock) -> None:
        self._worker, self._limits, self._clock = worker, limits, clock
        self._received, self._num_lines = [b""], 0
        self._asked_s = self._begun_s = clock()

    def __enter__(self) -> _Exchange:
        return self

    def wants_more(self, part: bytes) -> bool:
        """Add received data, which is empty if the worker has ended; return whether more is expected."""
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
        """Return whether the worker was suspended, or the server while it waited for the first answer.

        The time limits then say nothing about the work. Without suspension, the worker would have ended at
        its wall-clock limit.
        """
        now_s = self._clock()
        late = now_s - self._begun_s > self._limits.wall_s + LATE_S
        return late or now_s - self._asked_s > self._limits.patience_s


def arguments_of(limits: Limits) -> tuple[Any, ...]:
    """Convert limits to an argument for a LimitedProcess, whose module calls `Limits(*argument)`."""
    return astuple(limits)


def serve(control_fd: int, limits: Limits, begin: Callable[[], Work], stack_bytes: int = STACK_BYTES) -> None:
    """Fork workers until the server closes the control socket. Each worker calls `begin` once.

    A worker runs the function that `begin` returns, on a stack of `stack_bytes`.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended workers must not remain as zombies
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
    """Run a worker in the forked process, then exit the process. Never returns."""
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
    """Set timers with signals that end this process even while it is inside a library; 0 means no limit."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def _limit_memory(num_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    allowed = pages * resource.getpagesize() + num_bytes
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY or allowed < soft:
        resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))


def _end_when_closed(lifeline: socket.socket) -> None:
    """Make the kernel send SIGIO, which ends this process, when the server closes its end of the lifeline."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    """End the process. Workers continue until they reach a limit or their connection is closed."""
    control.close()
    process.kill()
    process.wait()


def _close(connections: list[socket.socket]) -> None:
    for each in connections:
        each.close()
