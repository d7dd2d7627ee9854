from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from shortfin_apps.llm.components.request.messages import FinishReason
from shortfin_apps.llm.contract.errors import InvalidRequestError, OverloadedError, UnavailableError
from shortfin_apps.llm.serving.frontend.async_engine import AsyncEngine
from tests.components.device_gate import Gate
from tests.components.engine_fixture import Rig, call
from tests.components.fake_device import greedy_continuation
from tests.serving.frontend.streams import PROMPT, tokens_of, until_idle

pytestmark = pytest.mark.timeout(60)


async def test_streams_are_the_models_greedy_continuations(engine: AsyncEngine) -> None:
    streams = [engine.admit(call(str(i), PROMPT[i:], max_tokens=9)) for i in range(4)]
    outputs = await asyncio.gather(*(tokens_of(stream) for stream in streams))
    assert outputs == [greedy_continuation(PROMPT[i:], 9) for i in range(4)]


async def test_admission_is_decided_at_the_call(engine: AsyncEngine) -> None:
    held = [engine.admit(call(str(i), PROMPT)) for i in range(4)]
    with pytest.raises(OverloadedError, match="4 requests"):
        engine.admit(call("x", PROMPT))
    with pytest.raises(InvalidRequestError, match="context"):
        engine.admit(call("y", PROMPT, max_tokens=100))
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.admit(call("0", PROMPT))
    await asyncio.gather(*(tokens_of(stream) for stream in held))
    assert await tokens_of(engine.admit(call("x", PROMPT))) == greedy_continuation(PROMPT, 4)


async def test_a_call_that_resumes_needs_no_place_and_is_admitted_while_draining(engine: AsyncEngine) -> None:
    held = [engine.admit(call(str(i), PROMPT)) for i in range(4)]
    resumed = [engine.admit(replace(call("r", PROMPT), resumes=True))]
    draining = asyncio.create_task(engine.drain(20))
    await asyncio.sleep(0)
    resumed.append(engine.admit(replace(call("s", PROMPT), resumes=True)))
    outputs = await asyncio.gather(*(tokens_of(stream) for stream in [*held, *resumed]))
    assert outputs == [greedy_continuation(PROMPT, 4)] * 6
    await draining
    await engine.close()
    with pytest.raises(UnavailableError):
        engine.admit(replace(call("t", PROMPT), resumes=True))


async def test_abort_ends_the_stream(rig: Rig, engine: AsyncEngine) -> None:
    gate = Gate(rig)
    stream = engine.admit(call("a", PROMPT, max_tokens=50))
    await gate.reached()
    assert engine.abort("a")
    gate.open()
    deltas = [delta async for delta in stream]
    assert deltas[-1].finish_reason is FinishReason.ABORT
    assert not engine.abort("a")


async def test_abort_all_ends_every_stream_and_frees_everything(rig: Rig, engine: AsyncEngine) -> None:
    gate = Gate(rig)
    streams = [engine.admit(call(str(i), PROMPT, max_tokens=50)) for i in range(4)]
    await gate.reached()
    assert engine.abort_all() == 4
    gate.open()
    for stream in streams:
        deltas = [delta async for delta in stream]
        assert deltas[-1].finish_reason is FinishReason.ABORT
    await until_idle(engine)
    assert engine.stats().steps <= 1, "all were freed before another step"
    assert engine.stats().pages.leased == 0


async def test_drain_refuses_new_requests_and_waits_for_the_others(engine: AsyncEngine) -> None:
    stream = engine.admit(call("a", PROMPT, max_tokens=9))
    draining = asyncio.create_task(engine.drain(20))
    await asyncio.sleep(0)
    assert not engine.ready
    with pytest.raises(UnavailableError):
        engine.admit(call("b", PROMPT))
    assert await tokens_of(stream) == greedy_continuation(PROMPT, 9)
    await draining


async def test_drain_aborts_requests_left_at_the_timeout(rig: Rig, engine: AsyncEngine) -> None:
    gate = Gate(rig)
    stream = engine.admit(call("a", PROMPT, max_tokens=50))
    await gate.reached()
    draining = asyncio.create_task(engine.drain(0))
    while engine.ready:
        await asyncio.sleep(0)
    gate.open()
    await draining
    deltas = [delta async for delta in stream]
    assert deltas[-1].finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)


async def test_prompt_tokens_are_bounded_until_the_first_token(rig: Rig) -> None:
    engine = AsyncEngine(rig.engine, max_requests=9, max_queue_tokens=12)
    gate = Gate(rig)
    engine.start()
    held = [engine.admit(call("a", PROMPT)), engine.admit(call("b", PROMPT))]
    await gate.reached()
    with pytest.raises(OverloadedError, match="10 prompt tokens") as caught:
        engine.admit(call("c", PROMPT))
    assert caught.value.retry_after_s > 0
    gate.open()
    await asyncio.gather(*(anext(stream) for stream in held))
    held.append(engine.admit(call("c", PROMPT)))
    await asyncio.gather(*(tokens_of(stream) for stream in held))
    await engine.close()


async def test_running_requests_are_answered_when_the_engine_is_closed(rig: Rig) -> None:
    engine = AsyncEngine(rig.engine, max_requests=4)
    engine.start()
    stream = engine.admit(call("a", PROMPT, max_tokens=50))
    deltas = [await anext(stream)]
    assert await engine.close()
    deltas += [delta async for delta in stream]
    last = deltas[-1]
    assert isinstance(last.error, UnavailableError) or last.finish_reason is FinishReason.LENGTH
