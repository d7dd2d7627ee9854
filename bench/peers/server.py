"""Server processes: started once, paused with SIGSTOP while others are measured, and finally ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bench.peers.cache import SetUpError

START_LIMIT_S = 900  # the first start of a server may compile kernels
END_LIMIT_S = 30
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a server; it is ready once `ready_path` answers 200."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_path: str = "/health"


class Server:
    """A running server in its own process group, paused while it is not measured.

    Some servers spin while idle, and all have threads that wake up; a paused one uses no CPU time.
    """

    def __init__(self, launch: Launch, port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._ready_url = self.url + launch.ready_path
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                launch.command,
                env={**os.environ, **launch.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Wait until ready. Raises SetUpError if the server ends or takes too long."""
        deadline = time.monotonic() + START_LIMIT_S
        while not self._is_ready():
            if self._process.poll() is not None:
                raise SetUpError(
                    f"the server ended (exit {self._process.returncode}); its output is in {self._log}"
                )
            if time.monotonic() > deadline:
                raise SetUpError(
                    f"the server was not ready after {START_LIMIT_S} s; its output is in {self._log}"
                )
            time.sleep(0.25)

    def pause(self) -> None:
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)
        self.wait_until_ready()

    def end(self) -> None:
        """Terminate the whole group, and kill it after a timeout."""
        for kind in (signal.SIGCONT, signal.SIGTERM):
            self._signal(kind)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_LIMIT_S)
        self._signal(signal.SIGKILL)  # the rest of the group: workers may outlive their parent
        self._process.wait()

    def peak_memory_bytes(self) -> int:
        """Return the sum of its processes' peak resident sets; shared memory is counted for each."""
        return sum(_status_kib(process, "VmHWM") * 1024 for process in self._processes())

    def cpu_s(self) -> float:
        """Return the CPU time used by its processes."""
        return sum(_cpu_ticks(process) for process in self._processes()) / _TICKS_PER_S

    def _processes(self) -> Iterator[Path]:
        for process in Path("/proc").iterdir():
            if process.name.isdecimal() and _group(process) == self._process.pid:
                yield process

    def _signal(self, kind: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, kind)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self._ready_url, timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _fields(process: Path) -> list[str]:
    """Return the fields of `/proc/PID/stat` after the name, which may contain anything."""
    try:
        return (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return []  # the process has ended


def _group(process: Path) -> int | None:
    fields = _fields(process)
    return int(fields[2]) if fields else None


def _cpu_ticks(process: Path) -> int:
    fields = _fields(process)
    return int(fields[11]) + int(fields[12]) if fields else 0


def _status_kib(process: Path, name: str) -> int:
    try:
        lines = (process / "status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)
