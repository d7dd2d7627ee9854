from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from shortfin_apps.llm.components.frontend.async_engine import STALL_TIMEOUT_S, AsyncEngine
from shortfin_apps.llm.components.request.messages import Delta, FinishReason
from shortfin_apps.llm.components.request.request import State
from shortfin_apps.llm.errors import InvalidRequestError, InvocationError, OverloadedError, UnavailableError
from tests.components.device_gate import Gate
from tests.components.engine_fixture import Rig, call, make_rig
from tests.components.fake_device import fake_config, greedy_continuation

pytestmark = pytest.mark.timeout(60)

PROMPT = [3, 1, 4, 1, 5]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


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


async def test_prompt_tokens_are_bounded_until_the_first_token(rig: Rig) -> None:
    engine = AsyncEngine(rig.engine, max_requests=9, max_queue_tokens=12)
    gate = Gate(rig)
    engine.start()
    held = [engine.submit(call("a", PROMPT)), engine.submit(call("b", PROMPT))]
    await gate.reached()
    with pytest.raises(OverloadedError, match="10 prompt tokens") as caught:
        engine.submit(call("c", PROMPT))
    assert caught.value.retry_after_s > 0
    gate.open()
    await asyncio.gather(*(anext(stream) for stream in held))
    held.append(engine.submit(call("c", PROMPT)))
    await asyncio.gather(*(tokens(stream) for stream in held))
    await engine.close()


async def test_abort_all_ends_every_stream_and_frees_everything(rig: Rig, engine: AsyncEngine) -> None:
    gate = Gate(rig)
    streams = [engine.submit(call(str(i), PROMPT, max_tokens=50)) for i in range(4)]
    await gate.reached()
    assert engine.abort_all() == 4
    gate.open()
    for stream in streams:
        deltas = [delta async for delta in stream]
        assert deltas[-1].finish_reason is FinishReason.ABORT
    await until_idle(engine)
    assert engine.stats().steps <= 1, "all were freed before another step"
    assert engine.stats().pages.leased == 0


async def test_a_reader_that_stopped_reading_is_aborted(rig: Rig) -> None:
    engine = AsyncEngine(rig.engine, max_requests=4, max_unread_tokens=8)
    steps = threading.Semaphore(4)  # as many as the quick one has read, and a few ahead

    def wait(entry: str) -> None:
        assert steps.acquire(timeout=20)

    rig.program.faults.before = wait
    engine.start()
    slow = engine.submit(call("slow", PROMPT, max_tokens=50))
    quick = engine.submit(call("quick", [7] * 5, max_tokens=50))
    async for _ in quick:
        steps.release()
    await until_idle(engine)
    unread = [delta async for delta in slow]
    assert len(unread) == 1, "what waits is handed over at once"
    assert unread[0].finish_reason is FinishReason.ABORT
    assert "reads too slowly" in str(unread[0].error)
    assert 8 < len(unread[0].token_ids) < 50
    assert engine.stats().pages.leased == 0
    await engine.close()


async def test_a_reader_that_had_no_turn_is_not_slow(rig: Rig) -> None:
    """The event loop may be busy for many steps; that is not the client's doing."""
    engine = AsyncEngine(rig.engine, max_requests=4, max_unread_tokens=2)
    engine.start()
    reading = asyncio.create_task(tokens(engine.submit(call("a", PROMPT, max_tokens=40))))
    await asyncio.sleep(0)  # the reader waits
    done = threading.Event()
    while not done.is_set():  # nothing else runs in this loop meanwhile
        done.wait(0.001)
        if engine.stats().generation_tokens == 40:
            done.set()
    assert await reading == greedy_continuation(PROMPT, 40)
    await engine.close()


async def test_a_device_that_does_not_answer_has_everybody_answered_and_nobody_let_in(rig: Rig) -> None:
    clock = Clock()
    engine = AsyncEngine(rig.engine, max_requests=8, stall_timeout_s=0.05, clock=clock)
    engine.start()
    streams = [engine.submit(call(str(i), PROMPT, max_tokens=50)) for i in range(3)]
    await anext(streams[0])
    gate = Gate(rig)
    await gate.reached()
    streams.append(engine.submit(call("newcomer", PROMPT)))
    clock.now += 1.0
    for stream in streams:
        deltas = [delta async for delta in stream]
        assert deltas[-1].finish_reason is FinishReason.ERROR
        assert isinstance(deltas[-1].error, UnavailableError)
    assert (engine.healthy, engine.ready) == (False, False)
    with pytest.raises(UnavailableError, match="not answered"):
        engine.submit(call("later", PROMPT))
    await engine.drain(20)  # nobody is left to wait for
    gate.open()
    await until_idle(engine)
    assert engine.healthy
    assert engine.stats().pages.leased == 0, "what it had forgotten to free, it frees when it is back"
    await engine.close()


async def test_a_stuck_device_does_not_keep_the_server_from_stopping(rig: Rig) -> None:
    clock = Clock()
    closed: list[str] = []
    engine = AsyncEngine(
        rig.engine, max_requests=4, stall_timeout_s=1.0, clock=clock, on_close=lambda: closed.append("closed")
    )
    engine.start()
    gate = Gate(rig)
    stream = engine.submit(call("a", PROMPT))
    await gate.reached()
    assert not await engine.close(patience_s=0)
    clock.now += 2.0
    assert not await engine.close()
    assert not closed
    await stream.aclose()
    gate.open()
    await asyncio.to_thread(engine._thread.join)
    assert closed


async def test_the_end_of_the_engines_thread_is_everybodys_answer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = AsyncEngine(rig.engine, max_requests=4)
    engine.start()

    def broken(error: object = None) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(rig.scheduler, "plan", broken)
    monkeypatch.setattr(rig.engine, "fail_all", broken)
    deltas = [delta async for delta in engine.submit(call("a", PROMPT))]
    assert isinstance(deltas[-1].error, UnavailableError)
    await asyncio.to_thread(engine._thread.join)
    assert not engine.healthy
    with pytest.raises(UnavailableError):
        engine.submit(call("b", PROMPT))
    await engine.close()


async def test_a_request_out_of_step_does_not_touch_its_neighbours() -> None:
    rig = make_rig(strict=False)
    engine = AsyncEngine(rig.engine, max_requests=4)
    gate = Gate(rig)
    engine.start()
    good = engine.submit(call("good", PROMPT, max_tokens=9))
    await gate.reached()
    bad = engine.submit(call("bad", PROMPT, max_tokens=9))
    rig.engine.add(call("bad", PROMPT))  # the inbox will replace it: a bug
    wrong = next(iter(rig.scheduler.waiting))
    wrong.state = State.FINISHED
    gate.open()
    assert await tokens(good) == greedy_continuation(PROMPT, 9)
    assert await tokens(bad) == greedy_continuation(PROMPT, 9)
    await engine.close()


async def test_what_runs_when_the_engine_is_closed_is_answered(rig: Rig) -> None:
    engine = AsyncEngine(rig.engine, max_requests=4)
    engine.start()
    stream = engine.submit(call("a", PROMPT, max_tokens=50))
    deltas = [await anext(stream)]
    assert await engine.close()
    deltas += [delta async for delta in stream]
    last = deltas[-1]
    assert isinstance(last.error, UnavailableError) or last.finish_reason is FinishReason.LENGTH
