from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from shortfin_apps.llm.components.async_engine import STALL_TIMEOUT_S, AsyncEngine
from shortfin_apps.llm.components.messages import Delta, FinishReason
from shortfin_apps.llm.errors import InvalidRequestError, InvocationError, OverloadedError, UnavailableError
from tests.components.engine_fixture import Rig, call, make_rig
from tests.components.fake_device import fake_config, greedy_continuation

PROMPT = [3, 1, 4, 1, 5]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Gate:
    """Holds the device inside an invocation until a test opens it."""

    def __init__(self, rig: Rig) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()
        rig.program.faults.before = self._wait

    def _wait(self, entry: str) -> None:
        self.entered.set()
        assert self._open.wait(20)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, 20)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def rig() -> Rig:
    return make_rig(fake_config(pages=64))


@pytest_asyncio.fixture
async def engine(rig: Rig) -> AsyncIterator[AsyncEngine]:
    made = AsyncEngine(rig.engine, max_requests=4)
    made.start()
    yield made
    await made.close()


async def tokens(stream: AsyncGenerator[Delta, None]) -> list[int]:
    return [token async for delta in stream for token in delta.token_ids]


async def until_idle(engine: AsyncEngine) -> None:
    while engine.stats().num_running or engine.stats().num_waiting:
        await asyncio.sleep(0)


async def test_streams_what_the_model_says(engine: AsyncEngine) -> None:
    streams = [engine.submit(call(str(i), PROMPT[i:], max_tokens=9)) for i in range(4)]
    outputs = await asyncio.gather(*(tokens(stream) for stream in streams))
    assert outputs == [greedy_continuation(PROMPT[i:], 9) for i in range(4)]


async def test_admission_is_decided_at_the_call(engine: AsyncEngine) -> None:
    held = [engine.submit(call(str(i), PROMPT)) for i in range(4)]
    with pytest.raises(OverloadedError, match="4 requests"):
        engine.submit(call("x", PROMPT))
    with pytest.raises(InvalidRequestError, match="context"):
        engine.submit(call("y", PROMPT, max_tokens=100))
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.submit(call("0", PROMPT))
    await asyncio.gather(*(tokens(stream) for stream in held))
    assert await tokens(engine.submit(call("x", PROMPT))) == greedy_continuation(PROMPT, 4)


async def test_what_resumes_needs_no_place_and_is_let_in_while_draining(engine: AsyncEngine) -> None:
    held = [engine.submit(call(str(i), PROMPT)) for i in range(4)]
    resumed = [engine.submit(replace(call("r", PROMPT), resumes=True))]
    draining = asyncio.create_task(engine.drain(20))
    await asyncio.sleep(0)
    resumed.append(engine.submit(replace(call("s", PROMPT), resumes=True)))
    outputs = await asyncio.gather(*(tokens(stream) for stream in [*held, *resumed]))
    assert outputs == [greedy_continuation(PROMPT, 4)] * 6
    await draining
    await engine.close()
    with pytest.raises(UnavailableError):
        engine.submit(replace(call("t", PROMPT), resumes=True))


async def test_leaving_a_stream_early_frees_its_pages_within_a_step(rig: Rig, engine: AsyncEngine) -> None:
    stream = engine.submit(call("a", PROMPT, max_tokens=50))
    await anext(stream)
    steps = engine.stats().steps
    await stream.aclose()
    await until_idle(engine)
    assert engine.stats().steps <= steps + 2  # the one under way when it left, and the one that saw it
    assert engine.stats().pages.leased == 0


async def test_abort_ends_the_stream(rig: Rig, engine: AsyncEngine) -> None:
    gate = Gate(rig)
    stream = engine.submit(call("a", PROMPT, max_tokens=50))
    await gate.reached()
    assert engine.abort("a")
    gate.open()
    deltas = [delta async for delta in stream]
    assert deltas[-1].finish_reason is FinishReason.ABORT
    assert not engine.abort("a")


async def test_drain_refuses_newcomers_and_waits_for_the_rest(engine: AsyncEngine) -> None:
    stream = engine.submit(call("a", PROMPT, max_tokens=9))
    draining = asyncio.create_task(engine.drain(20))
    await asyncio.sleep(0)
    assert not engine.ready
    with pytest.raises(UnavailableError):
        engine.submit(call("b", PROMPT))
    assert await tokens(stream) == greedy_continuation(PROMPT, 9)
    await draining


async def test_drain_aborts_what_outlasts_its_patience(rig: Rig, engine: AsyncEngine) -> None:
    gate = Gate(rig)
    stream = engine.submit(call("a", PROMPT, max_tokens=50))
    await gate.reached()
    draining = asyncio.create_task(engine.drain(0))
    while engine.ready:
        await asyncio.sleep(0)
    gate.open()
    await draining
    deltas = [delta async for delta in stream]
    assert deltas[-1].finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)


async def test_health_tells_of_a_device_that_does_not_answer(rig: Rig) -> None:
    clock = Clock()
    engine = AsyncEngine(rig.engine, max_requests=4, clock=clock)
    assert not engine.healthy
    engine.start()
    assert engine.healthy
    gate = Gate(rig)
    stream = engine.submit(call("a", PROMPT))
    await gate.reached()
    clock.now += STALL_TIMEOUT_S / 2
    assert engine.healthy
    clock.now += STALL_TIMEOUT_S
    assert not engine.healthy
    gate.open()
    await tokens(stream)
    await until_idle(engine)
    clock.now += STALL_TIMEOUT_S * 10
    assert engine.healthy
    await engine.close()
    assert not engine.healthy


async def test_a_bug_in_the_engine_ends_its_requests_and_not_the_engine(
    rig: Rig, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(rig.scheduler, "plan", broken)
    deltas = [delta async for delta in engine.submit(call("a", PROMPT))]
    assert isinstance(deltas[-1].error, InvocationError)
    monkeypatch.undo()
    assert await tokens(engine.submit(call("b", PROMPT))) == greedy_continuation(PROMPT, 4)


async def test_close_releases_the_device_once(rig: Rig) -> None:
    closed: list[str] = []
    engine = AsyncEngine(rig.engine, max_requests=4, on_close=lambda: closed.append("closed"))
    engine.start()
    await engine.close()
    await engine.close()
    assert closed == ["closed"]
