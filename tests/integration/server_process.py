"""Runs the server as a process on a real artefact."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

from shortfin_apps.llm.artifact.artifact import Artifact

PATIENCE_S = 60.0  # for what takes seconds


@dataclass(frozen=True)
class Service:
    url: str
    process: subprocess.Popen[str]
    log: IO[str]  # a file, as an unread pipe would fill up and block the server

    def metric(self, *names: str) -> float:
        """The sum of the metrics, over all their labels, at one moment."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        begins = tuple(f"{name}{{" for name in names)
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(begins))

    def cpu_s(self) -> float:
        """CPU time used by all its threads so far."""
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in self._threads()) / 1e9

    def num_sleeps(self) -> int:
        """Voluntary context switches of all its threads so far."""
        texts = ((thread / "status").read_text() for thread in self._threads())
        return sum(int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for text in texts)

    def _threads(self) -> Iterator[Path]:
        return Path(f"/proc/{self.process.pid}/task").iterdir()


def llm(*arguments: str) -> list[str]:
    """The command line of the console script."""
    return [sys.executable, "-m", "shortfin_apps.llm", *arguments]


def start(artifact: Artifact, *flags: str, environment: Mapping[str, str] | None = None) -> Service:
    return start_with(str(artifact.vmfb.parent), *flags, environment=environment)


def start_with(*flags: str, environment: Mapping[str, str] | None = None) -> Service:
    """Starts a server with these flags on a free port; `environment` is added to that of this process."""
    command = [sys.executable, "-m", "shortfin_apps.llm.server", "--port", "0"]
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by `stop`
    process = subprocess.Popen(
        [*command, *flags],
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r" at (http://\S+)", line):
            return Service(found[1], process, log)
    log.seek(0)
    raise AssertionError(f"the server ended with {process.wait()} before it was ready:\n{log.read()}")


def stop(service: Service) -> int:
    service.process.send_signal(signal.SIGTERM)
    try:
        return service.process.wait(PATIENCE_S)
    finally:
        service.process.kill()
        assert service.process.stdout is not None
        with service.process.stdout, service.log as log:
            log.seek(0)
            print(log.read())  # pytest shows it if a test fails
