"""A process that does work that may not end, each piece in a worker that cannot outlast its limits.

Grammars and chat templates are programs of others, and the libraries that run them cannot be interrupted. So
the server starts this process, which imports the library once and forks workers. The kernel ends a worker
when a piece of work has used up its time or memory, or when the server hangs up on it, also by dying.

The process has a socket of the server's: with each byte on it comes one end of a connection, for a new
worker, and of a lifeline. Over the connection the server sends a piece of work as a line of JSON, and the
worker answers with two lines:

    null        it has begun: if the connection ends before the next line, a limit was hit
    result      as JSON

and waits for the next. The process ends when the server closes its socket, a worker when its connection and
its lifeline are closed. Nothing is sent over a lifeline, as the kernel's signal that it was closed is that of
data, too: it may still signal the data of a line while the worker already works on it.
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

NUM_ANSWERS = 2  # of a worker to a piece of work
BEGUN = b"null\n"
STACK_BYTES = 64 << 20
LINE_BUFFER_BYTES = 1 << 16
PART_BYTES = 1 << 18
LATE_S = 1.0  # by which the clock's limit may be exceeded on a busy machine
SLACK_S = 5.0  # that answers may take longer than the limits, as the process may have to start and fork first

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

Work = Callable[[bytes], object]
"""What a worker does with a line; it returns a value for JSON."""

Answers = list[Any]
"""Of a worker: both; the first alone where the work hit a limit; none where nothing is known of the work."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a piece of work: seconds of processor time and on the clock, and bytes on top of the process's."""

    cpu_s: float
    wall_s: float
    memory_bytes: int = 512 << 20

    @property
    def patience_s(self) -> float:
        """How long the answers to a piece of work may take."""
        return self.wall_s + SLACK_S


class LimitedProcess:
    """The server's end: owns the process. Raises OSError where none can be started."""

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
                stderr=subprocess.DEVNULL,  # libraries write there what a request made them fail on
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the server
            )
        self.close = weakref.finalize(self, _end, self.process, self._control)

    @property
    def is_over(self) -> bool:
        """The process has ended, so that there are no new workers."""
        return self.process.poll() is not None

    def new_worker(self) -> socket.socket:
        """A connection to a new worker. Raises OSError if the process has ended, or many wait for it."""
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
        """Both ends. Raises OSError where there are no more files."""
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
        """The lifeline last: a worker that begins a line then finds out by either."""
        super().close()
        self.lifeline.close()


class Workers:
    """Exchanges work with workers, and keeps those that wait for more, which end with this object.

    `begin` gives a connection to another worker: that is asked where an idle one says nothing of the work,
    as it was suspended, or has ended meanwhile. OSError of `begin` is no answer; other errors are raised.
    """

    def __init__(self, purpose: str, limits: Limits, clock: Clock = time.monotonic) -> None:
        self._purpose, self._limits, self._clock = purpose, limits, clock
        self.idle: list[socket.socket] = []
        self.close = weakref.finalize(self, _close, self.idle)

    def ask(self, work: bytes, begin: Callable[[], socket.socket]) -> Answers:
        """The answers to a line of JSON. For threads: each has a worker of its own."""
        for worker in self._candidates(begin):
            if answers := self.exchange(worker, work):
                return self._kept(worker, answers)
        return []

    async def ask_in_loop(self, work: bytes, begin: Callable[[], socket.socket]) -> Answers:
        """As `ask`, for an event loop. A call that is cancelled ends its worker."""
        import asyncio  # the process, which imports this file too, starts faster without it

        loop = asyncio.get_running_loop()
        for worker in self._candidates(begin):
            worker.setblocking(False)
            with _Exchange(worker, self._limits, self._clock) as exchange:
                async with asyncio.timeout(self._limits.patience_s):
                    await loop.sock_sendall(worker, work)
                    while exchange.goes_on(await loop.sock_recv(worker, PART_BYTES)):
                        pass
            if exchange.answers:
                return self._kept(worker, exchange.answers)
        return []

    def exchange(self, worker: socket.socket, work: bytes) -> Answers:
        """The answers of this worker, which is ended unless it gives both."""
        worker.settimeout(self._limits.patience_s)
        with _Exchange(worker, self._limits, self._clock) as exchange:
            worker.sendall(work)
            while exchange.goes_on(worker.recv(PART_BYTES)):
                pass
        return exchange.answers

    def _candidates(self, begin: Callable[[], socket.socket]) -> Iterator[socket.socket]:
        with suppress(IndexError):
            yield self.idle.pop()
        try:
            yield begin()
        except OSError as error:  # no more processes or files, many wait for the process, or it has ended
            logger.warning("%s: no worker can be started: %s", self._purpose, error)

    def _kept(self, worker: socket.socket, answers: Answers) -> Answers:
        if len(answers) == NUM_ANSWERS:
            self.idle.append(worker)
        return answers


class _Exchange:
    """What a worker sends for a piece of work. Ends with its `answers`, and ends it unless it gave both."""

    answers: Answers

    def __init__(self, worker: socket.socket, limits: Limits, clock: Clock) -> None:
        self._worker, self._limits, self._clock = worker, limits, clock
        self._received, self._num_lines = [b""], 0
        self._asked_s = self._begun_s = clock()

    def __enter__(self) -> _Exchange:
        return self

    def goes_on(self, part: bytes) -> bool:
        """Takes what was received, which is empty if the worker has ended; whether there is more to come."""
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
        """The worker, which the clock's limit ends when it goes on; or both, before the first answer came."""
        now_s = self._clock()
        late = now_s - self._begun_s > self._limits.wall_s + LATE_S
        return late or now_s - self._asked_s > self._limits.patience_s


def arguments_of(limits: Limits) -> tuple[Any, ...]:
    """What `serve` takes as `limits`, as an argument of a LimitedProcess."""
    return astuple(limits)


def serve(control_fd: int, limits: Limits, begin: Callable[[], Work], stack_bytes: int = STACK_BYTES) -> None:
    """The life of the process; `begin` is called in each worker, whose stack has `stack_bytes`."""
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
    """The life of a worker, which never returns."""
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
    """Both timers' signals end a process that does not handle them, also inside a library; 0: no limit."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def _limit_memory(num_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    allowed = pages * resource.getpagesize() + num_bytes
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY or allowed < soft:
        resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))


def _end_when_closed(lifeline: socket.socket) -> None:
    """Has the kernel send SIGIO, which ends this process, when the other side closes its end."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    """Work that is under way ends by its limits, or when its connection is closed."""
    control.close()
    process.kill()
    process.wait()


def _close(connections: list[socket.socket]) -> None:
    for each in connections:
        each.close()
