"""Compile Triton kernels in parallel processes, as Triton holds Python's lock for most of the time.

`python -m shortfin_apps.llm.builder.kernels.ahead_of_time.worker_processes FD` is a worker. It receives tasks
on the socket FD, and stops when the socket is closed, which the end of the build's process does too.
multiprocessing would not do: its processes run the caller's main module again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryDirectory

from shortfin_apps.llm.builder.kernels.ahead_of_time.compile import CodeObject, compile_kernel
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel

Keep = Callable[[Kernel, CodeObject], None]  # is called with each kernel that is finished
MAX_WORKERS = 8  # a worker takes 0.26 GB, and half a second of a CPU to start


@dataclass(frozen=True, slots=True)
class _Task:
    """A kernel to compile. Triton's functions cannot be pickled, so the worker imports `function`."""

    kernel: Kernel  # without its function
    module: str
    function: str
    architecture: str
    chip: str

    def run(self) -> CodeObject:
        function = getattr(import_module(self.module), self.function)
        return compile_kernel(replace(self.kernel, function=function), self.architecture, self.chip)


def compile_in_workers(
    kernels: Sequence[Kernel],
    architecture: str,
    chip: str,
    num_workers: int,
    keep: Keep,
) -> None:
    """Compile `kernels`, and pass each with its code to `keep` when it is finished.

    Leaves out a kernel if its compilation failed or its worker was killed.
    """
    waiting, running = list(kernels)[::-1], dict[Connection, Kernel]()
    with ExitStack() as stack:
        # Killed workers leave files there.
        scratch = stack.enter_context(TemporaryDirectory())
        idle = _start(stack, num_workers, scratch)
        while running or (idle and waiting):
            while idle and waiting:
                connection, kernel = idle.pop(), waiting.pop()
                with suppress(OSError):  # the worker was killed: recv() raises too
                    connection.send(_task(kernel, architecture, chip))
                running[connection] = kernel
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                kernel = running.pop(ready)
                with suppress(EOFError, OSError):  # the worker was killed
                    code = ready.recv()
                    idle.append(ready)
                    if code is not None:
                        keep(kernel, code)


def default_num_workers() -> int:
    """Return the number of CPUs that this process may use, at most MAX_WORKERS."""
    return min(len(os.sched_getaffinity(0)), MAX_WORKERS)


def _task(kernel: Kernel, architecture: str, chip: str) -> _Task:
    function = kernel.function
    return _Task(replace(kernel, function=None), function.__module__, function.__name__, architecture, chip)


def _start(stack: ExitStack, num_workers: int, scratch: str) -> list[Connection]:
    """Start workers, which end with `stack`; fewer if the system has no room for more."""
    started = []
    with suppress(OSError):
        for _ in range(num_workers):
            started.append(stack.enter_context(_worker(scratch)))
    return started


@contextmanager
def _worker(scratch: str) -> Iterator[Connection]:
    """Run a worker with `scratch` as its temporary folder, and return the connection to it."""
    ours, theirs = Pipe()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # kernels that fail are compiled again, where messages are seen
            env={**os.environ, "TMPDIR": scratch},
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C must reach only the build, which kills the workers
        )
        theirs.close()
        try:
            yield ours
        finally:
            process.kill()
            process.wait()


def _serve(connection: Connection) -> None:
    with suppress(EOFError, ConnectionError):  # the build has ended
        while True:
            task = connection.recv()
            try:
                code = task.run()
            except Exception:
                code = None
            connection.send(code)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
