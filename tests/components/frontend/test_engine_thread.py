from __future__ import annotations

import asyncio

import pytest

from shortfin_apps.llm.components.frontend.async_engine import AsyncEngine
from shortfin_apps.llm.components.request.request import State
from shortfin_apps.llm.errors import InvocationError, UnavailableError
from tests.components.device_gate import Gate
from tests.components.engine_fixture import Rig, call, make_rig
from tests.components.fake_device import greedy_continuation
from tests.components.frontend.streams import PROMPT, tokens_of

pytestmark = pytest.mark.timeout(60)


async def test_a_bug_in_the_engine_ends_its_requests_but_not_the_thread(
    rig: Rig, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(rig.scheduler, "plan", broken)
    deltas = [delta async for delta in engine.admit(call("a", PROMPT))]
    assert isinstance(deltas[-1].error, InvocationError)
    monkeypatch.undo()
    assert await tokens_of(engine.admit(call("b", PROMPT))) == greedy_continuation(PROMPT, 4)


async def test_a_request_that_left_its_lifecycle_does_not_affect_others() -> None:
    rig = make_rig(strict=False)
    engine = AsyncEngine(rig.engine, max_requests=4)
    gate = Gate(rig)
    engine.start()
    good = engine.admit(call("good", PROMPT, max_tokens=9))
    await gate.reached()
    bad = engine.admit(call("bad", PROMPT, max_tokens=9))
    rig.engine.add(call("bad", PROMPT))  # the inbox will replace it: a bug
    wrong = next(iter(rig.scheduler.waiting))
    wrong.state = State.FINISHED
    gate.open()
    assert await tokens_of(good) == greedy_continuation(PROMPT, 9)
    assert await tokens_of(bad) == greedy_continuation(PROMPT, 9)
    await engine.close()


async def test_every_request_is_answered_when_the_thread_dies(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = AsyncEngine(rig.engine, max_requests=4)
    engine.start()

    def broken(error: object = None) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(rig.scheduler, "plan", broken)
    monkeypatch.setattr(rig.engine, "fail_all", broken)
    deltas = [delta async for delta in engine.admit(call("a", PROMPT))]
    assert isinstance(deltas[-1].error, UnavailableError)
    await asyncio.to_thread(engine._thread.join)
    assert not engine.healthy
    with pytest.raises(UnavailableError):
        engine.admit(call("b", PROMPT))
    await engine.close()


async def test_close_releases_the_device_once(rig: Rig) -> None:
    closed: list[str] = []
    engine = AsyncEngine(rig.engine, max_requests=4, on_close=lambda: closed.append("closed"))
    engine.start()
    await engine.close()
    await engine.close()
    assert closed == ["closed"]
