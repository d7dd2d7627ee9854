"""A device that fails under a real server: all clients are answered, and `/health` reports it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from shortfin_apps.llm.contract.errors import DeviceLostError
from shortfin_apps.llm.serving.frontend.async_engine import MAX_CONSECUTIVE_FAILURES, AsyncEngine
from shortfin_apps.llm.serving.frontend.metrics import ServerMetrics
from shortfin_apps.llm.serving.frontend.text_generation import TextGenerator
from shortfin_apps.llm.serving.server.model_loading import Loaded
from tests.components.device_gate import Gate
from tests.components.engine_fixture import Rig, make_rig
from tests.components.fake_device import fake_config
from tests.components.stepped_engine import SteppedClock
from tests.serving.api.harness import TOKENIZER
from tests.serving.api.loopback import Loopback, loopback

pytestmark = pytest.mark.slow

PROMPT = [3, 1, 4, 1, 5]
STALL_TIMEOUT_S = 0.05  # of the stepped clock; the watch looks by the wall's


@dataclass(frozen=True)
class Served:
    loop: Loopback
    rig: Rig
    engine: AsyncEngine
    clock: SteppedClock

    async def status(self, path: str) -> int:
        return (await self.loop.client.get(path)).status_code

    async def until_well(self) -> None:
        """Waits until the engine is healthy and idle."""
        async with asyncio.timeout(20):
            while await self.status("/health") != 200:
                await asyncio.sleep(0)
            while self.engine.stats().num_running or self.engine.stats().num_waiting:
                await asyncio.sleep(0)


@asynccontextmanager
async def served() -> AsyncIterator[Served]:
    """A server on a loopback port, with a real engine and thread on the fake device."""
    rig, clock = make_rig(fake_config(pages=64), max_running=2), SteppedClock()
    engine = AsyncEngine(rig.engine, max_requests=8, stall_timeout_s=STALL_TIMEOUT_S, clock=clock)
    generator = TextGenerator(
        TOKENIZER, engine, max_seq_len=64, max_requests=8, metrics=ServerMetrics("fake")
    )

    def load(loaded: Loaded) -> Loaded:
        return Loaded(replace(loaded.model, generator=generator), engine)

    async with loopback(load=load) as loop:
        await loop.until_ready()
        yield Served(loop, rig, engine, clock)


def body(max_tokens: int = 40, **more: Any) -> dict[str, Any]:
    params = {"max_completion_tokens": max_tokens, "ignore_eos": True}
    return {"input_ids": PROMPT, "sampling_params": params, **more}


async def test_a_device_that_stops_answering() -> None:
    async with served() as server:
        gate = Gate(server.rig)
        post = server.loop.client.post
        streams = [asyncio.create_task(post("/generate", json=body(stream=True))) for _ in range(2)]
        others = [asyncio.create_task(post("/generate", json=body())) for _ in range(4)]
        await gate.reached()
        while len(server.loop.server.server_state.tasks) < len(streams) + len(others):
            await asyncio.sleep(0)
        assert await server.status("/health") == 200
        server.clock.now_s += 2 * STALL_TIMEOUT_S
        for answer in await asyncio.gather(*streams, *others):  # none has a token yet
            assert "not answered" in answer.text
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert (await server.status("/health"), await server.status("/ready")) == (503, 503)
        assert (await post("/generate", json=body())).status_code == 503
        gate.open()
        await server.until_well()
        assert server.engine.stats().pages.leased == 0


async def test_a_device_that_is_lost() -> None:
    """It is told at once and to everybody, although the fake would compute again."""
    async with served() as server:

        def fail(name: str) -> None:
            server.rig.program.faults.call = lambda name: None
            raise DeviceLostError("the device has failed for good; restart the server")

        post = server.loop.client.post
        server.rig.program.faults.call = fail
        failed = await post("/generate", json=body())
        refused = await post("/generate", json=body())
        for answer in (failed, refused):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
            assert "has failed for good; restart the server" in answer.json()["error"]
        health = await server.loop.client.get("/health")
        assert (health.status_code, await server.status("/ready")) == (503, 503)
        assert "has failed for good" in health.json()["reason"]
        assert server.engine.stats().pages.leased == 0
        await server.loop.ended()
        assert server.loop.server.is_lost
        assert server.loop.server.leaves_thread, "a lost device is not released"


async def test_a_device_that_hangs_ends_the_server() -> None:
    async with served() as server:
        gate = Gate(server.rig)
        asking = asyncio.create_task(server.loop.client.post("/generate", json=body()))
        await gate.reached()
        server.clock.now_s += 2 * STALL_TIMEOUT_S
        assert (await asking).status_code == 503
        assert not server.loop.server.is_lost, "the device may yet answer"
        server.clock.now_s += STALL_TIMEOUT_S
        assert "not answered" in (await server.loop.client.get("/health")).json()["reason"]
        while not server.loop.server.is_lost:
            await asyncio.sleep(0.01)
        gate.open()
        while await server.status("/health") != 200:
            await asyncio.sleep(0)
        late = await server.loop.client.post("/generate", json=body())
        assert late.status_code == 503, "it would be cut off"
        await server.loop.ended()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_device_that_always_fails(stream: bool) -> None:
    async with served() as server:

        def fail(name: str) -> None:
            raise RuntimeError("the device is gone")

        post = server.loop.client.post
        server.rig.program.faults.call = fail
        answers = await asyncio.gather(*(post("/generate", json=body(stream=stream)) for _ in range(8)))
        for answer in answers:
            assert "the device is gone" in answer.text
            assert answer.status_code == 500
        assert server.engine.stats().consecutive_failures >= MAX_CONSECUTIVE_FAILURES
        assert await server.status("/health") == 503
        server.rig.program.faults.call = lambda name: None
        assert (await post("/generate", json=body(3))).status_code == 200
        assert await server.status("/health") == 200


def lose(server: Served) -> None:
    """From now on, every call of the device fails."""

    def fail(name: str) -> None:
        raise DeviceLostError("the device has failed for good; restart the server, then retry")

    server.rig.program.faults.call = fail


async def until_lost(server: Served) -> None:
    await server.loop.ended()
    assert server.loop.server.is_lost
    assert server.loop.server.leaves_thread
    assert server.engine.stats().pages.leased == 0


async def test_a_loss_in_the_middle_of_a_stream_is_its_last_event() -> None:
    async with served() as server:
        entries: list[str] = []
        has_token = threading.Event()

        def before(entry: str) -> None:
            entries.append(entry)
            if len(entries) > 5:
                assert has_token.wait(20)
                lose(server)
                raise DeviceLostError("the device has failed for good; restart the server, then retry")

        server.rig.program.faults.before = before
        async with server.loop.client.stream("POST", "/generate", json=body(stream=True)) as answer:
            events = (line async for line in answer.aiter_lines() if line.startswith("data: "))
            assert "error" not in await anext(events)
            has_token.set()
            assert "DEVICE_LOST" in "".join([event async for event in events][-2:])
        assert answer.status_code == 200
        await until_lost(server)


async def test_a_loss_while_a_request_is_aborted() -> None:
    async with served() as server:
        gate = Gate(server.rig)
        asking = [
            asyncio.create_task(server.loop.client.post("/generate", json=body(rid=f"r{n}")))
            for n in range(2)
        ]
        await gate.reached()
        lose(server)
        await server.loop.client.post("/abort", json={"rid": "r0"})
        gate.open()
        assert {(await each).status_code for each in asking} <= {200, 503}
        await until_lost(server)


async def draining(server: Served) -> tuple[Gate, asyncio.Task[httpx.Response]]:
    """Begin a drain in the middle of a step; return the step's gate and its request."""
    gate = Gate(server.rig)
    asking = asyncio.create_task(server.loop.client.post("/generate", json=body()))
    await gate.reached()
    server.loop.server.should_exit = True
    while await server.status("/ready") == 200:
        await asyncio.sleep(0)
    return gate, asking


async def test_a_loss_during_the_drain_ends_it_with_the_status_of_a_loss() -> None:
    async with served() as server:
        gate, asking = await draining(server)
        lose(server)
        gate.open()
        assert (await asking).status_code == 503
        await until_lost(server)


async def test_a_device_that_hangs_during_the_drain_does_not_delay_it() -> None:
    async with served() as server:
        gate, asking = await draining(server)
        server.clock.now_s += 3 * STALL_TIMEOUT_S
        assert (await asking).status_code == 503
        await server.loop.ended()
        assert server.loop.server.leaves_thread
        gate.open()
