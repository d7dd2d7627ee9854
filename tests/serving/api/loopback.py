"""The real server on a loopback port, in this event loop, over a scripted engine."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from shortfin_apps.llm.serving.api.limits import Limits
from shortfin_apps.llm.serving.server import config_sources
from shortfin_apps.llm.serving.server.http_server import Server, bind
from shortfin_apps.llm.serving.server.model_loading import Loaded
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer
from tests.serving.api.harness import TOKENIZER, Harness
from tests.serving.api.scripted_engine import Script, ScriptedEngine

TIMEOUT_S = 10.0  # generous: it takes milliseconds


@dataclass(frozen=True)
class Loopback:
    server: Server
    engine: ScriptedEngine
    client: httpx.AsyncClient
    port: int
    serving: asyncio.Task[None]

    async def until_ready(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while (await self.client.get("/ready")).status_code != 200:
                await asyncio.sleep(0)

    async def ended(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await self.serving

    async def send_raw(self, path: str, body: bytes) -> asyncio.StreamWriter:
        """Posts a request on its own connection and leaves the answer unread."""
        return (await self.open_raw(path, body))[1]

    async def open_raw(self, path: str, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Posts a request on its own connection, and returns both ends of it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        return reader, writer


@asynccontextmanager
async def loopback(
    script: Script | None = None,
    load: Callable[[Loaded], Loaded] = lambda loaded: loaded,
    *,
    tls: ssl.SSLContext | None = None,
    tokenizer: Tokenizer = TOKENIZER,
    stream_keep_alive_s: float | None = None,
    **flags: object,
) -> AsyncIterator[Loopback]:
    """A server whose loader thread calls `load` with the loaded model, and uses its result.

    `flags` are settings of the server; `tls`, if they turn TLS on, is what the client trusts.
    """
    config = config_sources.load({"artifact": "model", "shutdown_timeout": 5, **flags})
    harness = Harness(
        script,
        limits=Limits(body_bytes=config.requests.max_body_bytes),
        strict_fields=config.requests.strict_fields,
        stream_keep_alive_s=stream_keep_alive_s,
        tokenizer=tokenizer,
    )
    loaded = Loaded(harness.service.model, harness.engine)
    harness.service._model = None
    sock = bind("127.0.0.1", 0)
    # Connections inherit this small buffer, so a client that does not read is noticed after kilobytes.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)
    port = sock.getsockname()[1]
    server = Server(config, harness.service, lambda: load(loaded))
    harness.service.metrics.watch = lambda engine: None  # type: ignore[method-assign]  # watched already
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, verify=tls or True) as client:
        loop = Loopback(server, harness.engine, client, port, serving)
        try:
            yield loop
        finally:
            server.should_exit = True
            await loop.ended()
            await harness.client.aclose()


@asynccontextmanager
async def ready_server(script: Script | None = None, **options: Any) -> AsyncIterator[Loopback]:
    """Like `loopback`, with the model loaded."""
    async with loopback(script, **options) as server:
        await server.until_ready()
        yield server
