from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.peers.cache import SetUpError
from bench.peers.server import Launch, Server, free_port

# Answers /well; has a child process that spins, as some servers' workers do.
SPINNER = """
import http.server, os, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/well" else 404)
        self.end_headers()
    def log_message(self, *args):
        pass
child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
print(child.pid, os.environ["GREETING"], flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    port = free_port()
    launch = Launch((sys.executable, "-c", SPINNER, str(port)), {"GREETING": "hello"}, ready_path="/well")
    made = Server(launch, port, tmp_path / "logs" / "server.log")
    try:
        yield made
    finally:
        made.end()


def states(group: str) -> set[str]:
    """The states of a process and its children, a letter each, as in `ps`."""
    listed = subprocess.run(["ps", "-o", "stat=", "-g", group], capture_output=True, text=True, check=True)
    return {line.strip()[0] for line in listed.stdout.splitlines()}


def come_to(group: str, wanted: Callable[[set[str]], bool]) -> bool:
    """Waits for the expected states; a signal takes a moment to reach every process."""
    return any(wanted(states(group)) for _ in range(500))


def test_a_paused_server_uses_no_cpu_time_until_resumed(server: Server, tmp_path: Path) -> None:
    server.wait_until_ready()
    child, greeting = (tmp_path / "logs" / "server.log").read_text(encoding="utf-8").split()
    assert greeting == "hello"
    group = str(os.getpgid(int(child)))
    server.pause()
    assert come_to(group, lambda found: found == {"T"})
    before = server.cpu_s()
    states(group)
    assert server.cpu_s() == before
    server.resume()
    assert come_to(group, lambda found: "T" not in found)
    assert server.peak_memory_bytes() > 1e6
    server.end()
    with pytest.raises(ProcessLookupError):
        os.kill(int(group), 0)


def test_a_server_that_ends_at_once_is_reported(tmp_path: Path) -> None:
    server = Server(Launch((sys.executable, "-c", "raise SystemExit(5)")), free_port(), tmp_path / "log")
    with pytest.raises(SetUpError, match="exit 5"):
        server.wait_until_ready()
    server.end()
