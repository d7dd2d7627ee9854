from __future__ import annotations

import asyncio
import threading

import pytest

from shortfin_apps.llm.components.request.messages import FinishReason
from shortfin_apps.llm.serving.frontend.async_engine import AsyncEngine
from tests.components.engine_fixture import Rig, call
from tests.components.fake_device import greedy_continuation
from tests.serving.frontend.streams import PROMPT, tokens_of, until_idle

pytestmark = pytest.mark.timeout(60)


async def test_leaving_a_stream_early_frees_its_pages_within_a_step(rig: Rig, engine: AsyncEngine) -> None:
    stream = engine.admit(call("a", PROMPT, max_tokens=50))
    await anext(stream)
    steps = engine.stats().steps
    stream.close()
    await until_idle(engine)
    assert (
        engine.stats().steps <= steps + 2
    )  # the one under way when the reader left, and the one that noticed
    assert engine.stats().pages.leased == 0


async def test_a_reader_that_stopped_reading_is_aborted(rig: Rig) -> None:
    engine = AsyncEngine(rig.engine, max_requests=4, max_unread_tokens=8)
    steps = threading.Semaphore(4)  # as many as the quick one has read, and a few ahead

    def wait(entry: str) -> None:
        assert steps.acquire(timeout=20)

    rig.program.faults.before = wait
    engine.start()
    slow = engine.admit(call("slow", PROMPT, max_tokens=50))
    quick = engine.admit(call("quick", [7] * 5, max_tokens=50))
    async for _ in quick:
        steps.release()
    await until_idle(engine)
    unread = [delta async for delta in slow]
    assert len(unread) == 1, "unread deltas are joined"
    assert unread[0].finish_reason is FinishReason.ABORT
    assert "reads too slowly" in str(unread[0].error)
    assert 8 < len(unread[0].token_ids) < 50
    assert engine.stats().pages.leased == 0
    await engine.close()


async def test_a_reader_that_a_busy_event_loop_keeps_waiting_is_not_slow(rig: Rig) -> None:
    """The event loop may be busy for many steps; the client is not to blame for that."""
    engine = AsyncEngine(rig.engine, max_requests=4, max_unread_tokens=2)
    engine.start()
    reading = asyncio.create_task(tokens_of(engine.admit(call("a", PROMPT, max_tokens=40))))
    await asyncio.sleep(0)  # the reader waits
    done = threading.Event()
    while not done.is_set():  # nothing else runs in this loop meanwhile
        done.wait(0.001)
        if engine.stats().generation_tokens == 40:
            done.set()
    assert await reading == greedy_continuation(PROMPT, 40)
    await engine.close()
