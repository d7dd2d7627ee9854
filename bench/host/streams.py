"""Measures CPU times of the two threads of server.py's server, with clients that cost next to nothing.

The clients are sockets of one thread that counts events without parsing JSON, so that two CPUs suffice for
clients and server together. Every request is measured from its admission to its end.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from bench.running_server import running_server

PROMPT_TOKEN_IDS = tuple(range(300, 332))  # none is part of a character
OUTPUT_TOKENS, FIRST_OUTPUT_TOKENS = 1024, 16
_RECEIVE_BYTES = 1 << 16
_EVENT, _END = b"data: {", b"data: [DONE]"
_OVERLAP = len(_END) - 1
_PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """The figures of one pass; CPU times in microseconds per output token."""

    tokens_per_s: float
    loop_us: float  # event loops of all processes that answer HTTP
    link_us: float  # main thread of the engine's process if separate, else 0
    engine_us: float
    itl_p50_ms: float  # between two chunks, as seen by a client
    itl_p99_ms: float
    tokens_per_chunk: float
    errors: int


@dataclass(slots=True)
class _Client:
    """One request on its own connection."""

    connection: socket.socket
    num_events: int = 0
    has_ended: bool = False
    arrivals_s: list[float] = field(default_factory=list)  # of chunks
    rest: bytes = field(default=b"")  # possibly the start of an event

    def receive(self) -> bool:
        """Count the received events; return whether more will follow."""
        data = self.connection.recv(_RECEIVE_BYTES)
        text = self.rest + data
        if num_events := text.count(_EVENT):
            self.num_events += num_events
            self.arrivals_s.append(time.perf_counter())
        self.has_ended = self.has_ended or _END in text
        self.rest = text[text.rfind(b"\n") + 1 :][-_OVERLAP:]
        if _EVENT in self.rest:
            self.rest = b""
        return bool(data) and not self.has_ended


def stream_tokens(
    rows: int, step_ms: float, profile: Path | None = None, api_processes: int = 0
) -> StreamFigures:
    """Send one request from each of `rows` clients at once, after shorter unmeasured ones."""
    flags = ["--rows", str(rows), "--step-ms", str(step_ms), "--api-processes", str(api_processes)]
    if profile is not None:
        flags += ["--profile", str(profile)]
    with running_server(flags, module="bench.host.server") as server:
        _run(server.url, rows, FIRST_OUTPUT_TOKENS)
        pids = _api_processes(server.process.pid)
        before, api_before_s = server.thread_cpu_s(), sum(map(_main_thread_cpu_s, pids))
        began_s = time.perf_counter()
        clients = _run(server.url, rows, OUTPUT_TOKENS)
        taken_s, after = time.perf_counter() - began_s, server.thread_cpu_s()
        api_s = sum(map(_main_thread_cpu_s, pids)) - api_before_s
    main_s, engine_s = _busiest(before, after, server.process.pid)
    loop_s, link_s = (api_s, main_s) if pids else (main_s, 0.0)
    return _figures(clients, taken_s, loop_s=loop_s, link_s=link_s, engine_s=engine_s)


def stream_from(url: str, rows: int, pid: int) -> StreamFigures:
    """Measure a running server; `loop_us` covers all threads of its process `pid`."""
    _run(url, rows, FIRST_OUTPUT_TOKENS)
    before_s, began_s = _process_cpu_s(pid), time.perf_counter()
    clients = _run(url, rows, OUTPUT_TOKENS)
    taken_s, cpu_s = time.perf_counter() - began_s, _process_cpu_s(pid) - before_s
    return _figures(clients, taken_s, loop_s=cpu_s)


def _figures(
    clients: Sequence[_Client], taken_s: float, *, loop_s: float, link_s: float = 0.0, engine_s: float = 0.0
) -> StreamFigures:
    num_tokens = len(clients) * OUTPUT_TOKENS
    gaps_ms = [1e3 * (late - early) for client in clients for early, late in pairwise(client.arrivals_s)]
    return StreamFigures(
        tokens_per_s=num_tokens / taken_s,
        loop_us=loop_s / num_tokens * 1e6,
        link_us=link_s / num_tokens * 1e6,
        engine_us=engine_s / num_tokens * 1e6,
        itl_p50_ms=float(np.percentile(gaps_ms, 50)),
        itl_p99_ms=float(np.percentile(gaps_ms, 99)),
        tokens_per_chunk=num_tokens / max(1, sum(client.num_events for client in clients)),
        errors=sum(not client.has_ended for client in clients),
    )


def _process_cpu_s(pid: int) -> float:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _api_processes(pid: int) -> list[int]:
    """Return the processes that answer HTTP for server `pid`; empty if it does so itself."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"api_process" in Path(f"/proc/{child}/cmdline").read_bytes()]


def _main_thread_cpu_s(pid: int) -> float:
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def _busiest(before: dict[int, float], after: dict[int, float], main: int) -> tuple[float, float]:
    """Return CPU seconds of the main thread (the event loop) and the busiest other one (the engine)."""
    taken = {thread: cpu_s - before.get(thread, 0.0) for thread, cpu_s in after.items()}
    return taken.pop(main), max(taken.values())


def _run(url: str, rows: int, output_tokens: int) -> Sequence[_Client]:
    """Stream `output_tokens` to each of `rows` clients."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    clients = [_Client(_ask(address.hostname, address.port, output_tokens)) for _ in range(rows)]
    give_up_s = time.perf_counter() + _PATIENCE_S
    with selectors.DefaultSelector() as selector:
        for client in clients:
            selector.register(client.connection, selectors.EVENT_READ, client)
        while selector.get_map() and time.perf_counter() < give_up_s:
            for key, _ in selector.select(timeout=1.0):
                if not key.data.receive():
                    selector.unregister(key.fileobj)
                    key.data.connection.close()
    return clients


def _ask(host: str, port: int, output_tokens: int) -> socket.socket:
    body = json.dumps(
        {
            "prompt": PROMPT_TOKEN_IDS,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection((host, port))
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection
