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


@dataclass(frozen=True)
class RunningServer:
    url: str
    process: subprocess.Popen[str]

    def rss_bytes(self) -> int:
        """Resident memory."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * PAGE_BYTES

    def num_files(self) -> int:
        """Open file descriptors, sockets among them."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def stop(self) -> int:
        """Sends SIGTERM, waits for the drain, and returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()


@contextmanager
def running_server(flags: Sequence[str]) -> Iterator[RunningServer]:
    """A ready server on a free port, stopped at the end of the context. Exits if it does not start."""
    command = [sys.executable, "-m", "shortfin_apps.llm.server", *flags, "--port", "0"]
    process = subprocess.Popen([*command, "--log-level", "warning"], stdout=subprocess.PIPE, text=True)
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
