"""The server of server.py under streaming clients that cost next to nothing: CPU times of its two threads.

The clients are sockets of one thread that counts events and parses no JSON, so that two CPUs bear them and
the server at once. Every request is counted from its admission to its end.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from bench.running_server import RunningServer, running_server

PROMPT_TOKEN_IDS = tuple(range(300, 332))  # none is a part of a character
OUTPUT_TOKENS, FIRST_OUTPUT_TOKENS = 1024, 16
_RECEIVE_BYTES = 1 << 16
_EVENT, _END = b"data: {", b"data: [DONE]"
_OVERLAP = len(_END) - 1
_PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """Of one pass; CPU times in microseconds for each output token."""

    tokens_per_s: float
    loop_us: float
    engine_us: float
    tokens_per_chunk: float
    errors: int


@dataclass(slots=True)
class _Client:
    """One request on its own connection."""

    connection: socket.socket
    num_events: int = 0
    has_ended: bool = False
    rest: bytes = field(default=b"")  # what may be the beginning of an event

    def receive(self) -> bool:
        """Counts what has arrived; whether more is to come."""
        data = self.connection.recv(_RECEIVE_BYTES)
        text = self.rest + data
        self.num_events += text.count(_EVENT)
        self.has_ended = self.has_ended or _END in text
        self.rest = text[text.rfind(b"\n") + 1 :][-_OVERLAP:]
        if _EVENT in self.rest:
            self.rest = b""
        return bool(data) and not self.has_ended


def stream_tokens(rows: int, step_ms: float, profile: Path | None = None) -> StreamFigures:
    """One request of each of `rows` clients at once, after shorter ones that are not measured."""
    flags = ["--rows", str(rows), "--step-ms", str(step_ms)]
    if profile is not None:
        flags += ["--profile", str(profile)]
    with running_server(flags, module="bench.host.server") as server:
        _run(server, rows, FIRST_OUTPUT_TOKENS)
        before, began_s = server.thread_cpu_s(), time.perf_counter()
        clients = _run(server, rows, OUTPUT_TOKENS)
        taken_s, after = time.perf_counter() - began_s, server.thread_cpu_s()
    loop_s, engine_s = _busiest(before, after, server.process.pid)
    num_tokens = rows * OUTPUT_TOKENS
    return StreamFigures(
        tokens_per_s=num_tokens / taken_s,
        loop_us=loop_s / num_tokens * 1e6,
        engine_us=engine_s / num_tokens * 1e6,
        tokens_per_chunk=num_tokens / max(1, sum(client.num_events for client in clients)),
        errors=sum(not client.has_ended for client in clients),
    )


def _busiest(before: dict[int, float], after: dict[int, float], main: int) -> tuple[float, float]:
    """CPU seconds of the main thread, which runs the event loop, and of the busiest other: the engine's."""
    taken = {thread: cpu_s - before.get(thread, 0.0) for thread, cpu_s in after.items()}
    return taken.pop(main), max(taken.values())


def _run(server: RunningServer, rows: int, output_tokens: int) -> Sequence[_Client]:
    """Streams `output_tokens` to each of `rows` clients."""
    address = urlsplit(server.url)
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
