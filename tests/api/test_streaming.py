from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from dataclasses import replace

import pytest

from shortfin_apps.llm.components.frontend.async_engine import AsyncEngine
from shortfin_apps.llm.components.frontend.metrics import ServerMetrics
from shortfin_apps.llm.components.frontend.text_generation import TextGenerator
from shortfin_apps.llm.server.model_loading import Loaded
from shortfin_apps.llm.server.protocol import BoundedProtocol
from tests.api.harness import TOKENIZER
from tests.api.loopback import TIMEOUT_S, Loopback, ready_server
from tests.api.scripted_engine import forever
from tests.components.engine_fixture import Rig, make_rig
from tests.components.fake_device import fake_config

PATHS = ["/generate", "/v1/completions", "/v1/chat/completions"]
BODIES = {
    "/generate": b'{"text": ["a", "b"], "stream": %s}',
    "/v1/completions": b'{"prompt": ["a", "b"], "max_tokens": 9, "stream": %s}',
    "/v1/chat/completions": b'{"messages": [{"role": "user", "content": "a"}], "n": 2, "stream": %s}',
}


async def all_freed(server: Loopback) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while server.engine.live:
            await server.engine.freed.wait()
            server.engine.freed.clear()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [b"false", b"true"])
async def test_a_disconnect_while_waiting_aborts_all_sequences(path: str, stream: bytes) -> None:
    async with ready_server(forever(TOKENIZER, "the ")) as server:
        server.engine.gate.clear()
        writer = await server.send_raw(path, BODIES[path] % stream)
        await asyncio.wait_for(server.engine.waiting.wait(), TIMEOUT_S)
        assert len(server.engine.live) == 2
        writer.close()
        await all_freed(server)
        assert len(server.engine.aborted) == 2


async def test_a_disconnect_during_a_stream_aborts_all_sequences() -> None:
    async with ready_server(forever(TOKENIZER, "the ")) as server:
        body = {"prompt": "a", "max_tokens": 100, "stream": True}
        async with server.client.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_lines():
                server.engine.gate.clear()
                break
        await all_freed(server)


async def test_chunks_are_sent_as_they_are_generated() -> None:
    async with ready_server(forever(TOKENIZER, "the ")) as server:
        server.engine.gate.clear()
        body = {"text": "a", "stream": True}
        async with server.client.stream("POST", "/generate", json=body) as response:
            assert response.status_code == 200  # the header does not wait for the first token
            server.engine.gate.set()
            lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert len(lines) == 51


LONG_CONTEXT = 1500


def served_by(rig: Rig) -> Callable[[Loaded], Loaded]:
    """A loader that replaces the scripted engine by the real one over a fake device."""

    def load(loaded: Loaded) -> Loaded:
        engine = AsyncEngine(rig.engine, max_requests=8)
        generator = TextGenerator(
            TOKENIZER, engine, max_seq_len=LONG_CONTEXT, max_requests=8, metrics=ServerMetrics("m")
        )
        return Loaded(replace(loaded.model, generator=generator), engine)

    return load


async def ask_and_leave_unread(server: Loopback) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Requests a stream of megabytes, of which the client reads only what fits its small buffers."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", server.port))
    reader, writer = await asyncio.open_connection(sock=client, limit=1)  # size of asyncio's buffer
    params = {"max_tokens": LONG_CONTEXT - 10, "ignore_eos": True}
    body = json.dumps({"input_ids": [1], "sampling_params": params, "stream": True}).encode()
    head = b"POST /generate HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    return reader, writer


async def test_a_client_that_stops_reading_loses_its_pages(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = make_rig(fake_config(stride=16, pages=100, max_seq_len=LONG_CONTEXT))
    async with ready_server(load=served_by(rig), send_timeout=60) as server:
        _, writer = await ask_and_leave_unread(server)
        async with asyncio.timeout(TIMEOUT_S):
            while "reads too slowly" not in caplog.text:
                await asyncio.sleep(0.001)
            while rig.cache.usage().leased:
                await asyncio.sleep(0.001)
        assert rig.engine.stats().generation_tokens < LONG_CONTEXT - 10
        writer.transport.abort()


async def test_a_client_that_stops_reading_is_disconnected() -> None:
    rig = make_rig(fake_config(stride=16, pages=100, max_seq_len=LONG_CONTEXT))
    async with ready_server(load=served_by(rig), send_timeout=0.05) as server:
        reader, writer = await ask_and_leave_unread(server)
        async with asyncio.timeout(TIMEOUT_S):
            while not busy(server):
                await asyncio.sleep(0)
            while busy(server):
                await asyncio.sleep(0.001)
            answer = await reader.read()
        assert b"output_ids" in answer
        assert b"[DONE]" not in answer
        writer.close()


def busy(server: Loopback) -> list[BoundedProtocol]:
    """Connections with an incomplete answer."""
    protocols = [c for c in server.server.server_state.connections if isinstance(c, BoundedProtocol)]
    return [c for c in protocols if c.cycle is not None and not c.cycle.response_complete]
