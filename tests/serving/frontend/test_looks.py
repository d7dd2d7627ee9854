from __future__ import annotations

import asyncio

import pytest

from shortfin_apps.llm.components.engine.engine_watch import LOOK_S, EngineWatch
from shortfin_apps.llm.contract.errors import InvocationError, UnavailableError
from shortfin_apps.llm.serving.frontend.async_engine import AsyncEngine
from tests.components.device_gate import Gate
from tests.components.engine_fixture import PROMPT, Rig, call, make_rig
from tests.components.fake_device import fake_config, greedy_continuation
from tests.serving.frontend.streams import tokens_of

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of the engine's thread that are there for whoever looks."""
    calls: list[str] = []
    for name in ("look", "note"):
        genuine = getattr(EngineWatch, name)

        def count(*arguments: object, name: str = name, genuine: object = genuine) -> object:
            calls.append(name)
            return genuine(*arguments)  # type: ignore[operator]

        monkeypatch.setattr(EngineWatch, name, count)
    return calls


async def test_nobody_who_looks_costs_nothing(noted: list[str]) -> None:
    engine = AsyncEngine(make_rig(fake_config(pages=64)).engine, max_requests=4)
    engine.start()
    await tokens_of(engine.admit(call("a.0", PROMPT, max_tokens=9)))
    assert noted == []
    await engine.close()


async def test_looks_stop_costing_some_seconds_after_the_last(noted: list[str]) -> None:
    now = [0.0]
    engine = AsyncEngine(make_rig(fake_config(pages=64)).engine, max_requests=4, clock=lambda: now[0])
    engine.start()
    await engine.snapshot()
    now[0] = 2 * LOOK_S
    await tokens_of(engine.admit(call("a.0", PROMPT, max_tokens=9)))
    assert noted == ["look", "note", "note"][: len(noted)]
    assert noted.count("note") <= 2, "the turn of the look itself, and the one that finds it long ago"
    await engine.close()


async def test_a_busy_engine_is_looked_at_between_its_steps(engine: AsyncEngine) -> None:
    stream = engine.admit(call("a.0", PROMPT, max_tokens=9))
    found = await engine.snapshot()
    assert await tokens_of(stream) == greedy_continuation(PROMPT, 9)
    after = await engine.snapshot()
    assert after.at_s >= found.at_s
    assert after.stats.generation_tokens == 9
    assert after.requests == ()


async def test_a_look_waits_for_the_step_under_way(rig: Rig) -> None:
    engine = AsyncEngine(rig.engine, max_requests=4)
    gate = Gate(rig)
    engine.start()
    stream = engine.admit(call("a.0", PROMPT, max_tokens=2))
    await gate.reached()
    look = asyncio.create_task(engine.snapshot())
    await asyncio.sleep(0)
    assert not look.done()
    gate.open()
    assert (await look).stats.num_running == 1
    await tokens_of(stream)
    await engine.close()


async def test_looks_end_with_the_engine(rig: Rig) -> None:
    engine = AsyncEngine(rig.engine, max_requests=4)
    gate = Gate(rig)
    engine.start()
    stream = engine.admit(call("a.0", PROMPT, max_tokens=2))
    await gate.reached()
    look = asyncio.create_task(engine.snapshot())
    await asyncio.sleep(0)
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    gate.open()
    with pytest.raises(UnavailableError):
        await look
    await closing
    with pytest.raises(UnavailableError):
        await engine.snapshot()
    stream.close()


async def test_a_bug_in_a_look_ends_no_request(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(EngineWatch, "look", broken)
    stream = engine.admit(call("a.0", PROMPT, max_tokens=9))
    with pytest.raises(InvocationError):
        await engine.snapshot()
    assert await tokens_of(stream) == greedy_continuation(PROMPT, 9)


async def test_one_who_leaves_early_is_not_answered(engine: AsyncEngine) -> None:
    look = asyncio.create_task(engine.snapshot())
    await asyncio.sleep(0)
    look.cancel()
    with pytest.raises(asyncio.CancelledError):
        await look
    assert (await engine.snapshot()).requests == ()
