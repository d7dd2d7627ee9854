from __future__ import annotations

import asyncio

import pytest

from tests.api.harness import TOKENIZER
from tests.api.loopback import TIMEOUT_S, Loopback, loopback
from tests.api.scripted_engine import forever

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
async def test_a_client_that_leaves_while_it_waits_frees_everything(path: str, stream: bytes) -> None:
    async with loopback(forever(TOKENIZER, "the ")) as server:
        await server.until_ready()
        server.engine.gate.clear()
        writer = await server.send_raw(path, BODIES[path] % stream)
        await asyncio.wait_for(server.engine.waiting.wait(), TIMEOUT_S)
        assert len(server.engine.live) == 2
        writer.close()
        await all_freed(server)
        assert len(server.engine.aborted) == 2


async def test_a_client_that_leaves_in_mid_stream_frees_everything() -> None:
    async with loopback(forever(TOKENIZER, "the ")) as server:
        await server.until_ready()
        body = {"prompt": "a", "max_tokens": 100, "stream": True}
        async with server.client.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_lines():
                server.engine.gate.clear()
                break
        await all_freed(server)


async def test_chunks_arrive_as_they_are_made() -> None:
    async with loopback(forever(TOKENIZER, "the ")) as server:
        await server.until_ready()
        server.engine.gate.clear()
        body = {"text": "a", "stream": True}
        async with server.client.stream("POST", "/generate", json=body) as response:
            assert response.status_code == 200  # the header does not wait for the first token
            server.engine.gate.set()
            lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert len(lines) == 51
