"""Runs a server in its own process, for scripts that measure it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class RunningServer:
    url: str
    process: subprocess.Popen[str]

    def rss_bytes(self) -> int:
        """Return the resident memory."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * PAGE_BYTES

    def cpu_s(self) -> float:
        """Return the CPU time so far of all threads, in user space and in the kernel."""
        after_name = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(after_name[11]) + int(after_name[12])) / TICKS_PER_S

    def thread_cpu_s(self) -> dict[int, float]:
        """Return the CPU time so far by thread id; the main thread has the id of the process."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return {int(task.name): int((task / "schedstat").read_text().split()[0]) / 1e9 for task in tasks}

    def num_files(self) -> int:
        """Return the number of open file descriptors, including sockets."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def stop(self) -> int:
        """Send SIGTERM, wait for the drain, and return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()


@contextmanager
def running_server(flags: Sequence[str], module: str = "shortfin_apps.llm.server") -> Iterator[RunningServer]:
    """Run a server on a free port until the end of the context; exit if it does not start.

    `module` must accept the flags and print the server's address like the server itself.
    """
    command = [sys.executable, "-m", module, *flags, "--port", "0", "--log-level", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield RunningServer(
            next(found[1] for line in process.stdout if (found := re.search(r" at (http://\S+)", line))),
            process,
        )
    except StopIteration:
        raise SystemExit(f"the server ended with {process.wait()} before it was ready") from None
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        process.stdout.close()
