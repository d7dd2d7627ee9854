"""One process of a cluster: starts it, forwards its log, and stops it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shortfin_apps.llm.serving.server.config import ENV_PREFIX
from shortfin_apps.llm.serving.server.config_sources import OTHER_VARIABLES
from shortfin_apps.llm.tools.cluster.held_port import HeldPort

TAIL_LINES = 15
MAX_LINE_BYTES = 1 << 20
COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # the routers colour their log even if it is a pipe

Show = Callable[[str, str], None]  # receives a process's name and a line of its log


@dataclass(frozen=True, slots=True)
class Program:
    """A command: `python -m` these words, with `stdin` as JSON, which other users cannot read.

    `port` is passed down, and refuses connections while the program does not run.
    """

    name: str
    words: Sequence[str]
    stdin: Any
    logs_to_stdout: bool = False  # otherwise standard output is discarded
    port: HeldPort | None = None


class Process:
    """A running program. It receives SIGTERM when this process ends for any reason."""

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
        with contextlib.suppress(ConnectionError):  # it has ended, and its log has the reason
            process.stdin.write(json.dumps(program.stdin).encode())
            await process.stdin.drain()
        process.stdin.close()
        return cls(program, process, show)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Wait for the process and its log; return its exit status, negative for a signal."""
        status = await self._process.wait()
        if self.program.port is not None:
            self.program.port.refuse()
        # A process that it left running may hold the log open.
        await asyncio.wait({self._reading}, timeout=1)
        return status

    async def stop(self, patience_s: float) -> None:
        """Send SIGTERM, and SIGKILL if it has not ended after `patience_s`."""
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
            except ValueError:  # longer than MAX_LINE_BYTES: dropped
                continue
            if not line:
                return
            text = COLOUR.sub("", line.decode(errors="replace")).rstrip()
            self.tail.append(text)
            with contextlib.suppress(OSError, ValueError):  # a closed log must not block the process
                self._show(self.program.name, text)


def _environment() -> dict[str, str]:
    """Return our environment without settings: they were already read and are passed on stdin."""
    kept = {ENV_PREFIX + name for name in OTHER_VARIABLES}
    return {
        name: value
        for name, value in os.environ.items()
        if not name.upper().startswith(ENV_PREFIX) or name.upper() in kept
    }
