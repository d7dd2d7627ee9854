from __future__ import annotations

import asyncio
import threading

import pytest

from shortfin_apps.llm.components.request.request import State
from shortfin_apps.llm.contract.errors import InvocationError, UnavailableError
from shortfin_apps.llm.serving.frontend.async_engine import AsyncEngine
from tests.components.device_gate import Gate
from tests.components.engine_fixture import Rig, call, make_rig
from tests.components.fake_device import greedy_continuation
from tests.serving.frontend.streams import PROMPT, tokens_of

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


def break_thread(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the next step end the engine's thread."""

    def broken(error: object = None) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(rig.scheduler, "plan", broken)
    monkeypatch.setattr(rig.engine, "fail_all", broken)


async def test_every_request_is_answered_when_the_thread_dies(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = AsyncEngine(rig.engine, max_requests=4)
    engine.start()
    break_thread(rig, monkeypatch)
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


class CountedTest:
    """In the place of a self-test; its runs have three steps, and the second fails if it `fails`."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.steps = self.num_runs = self.notices = 0
        self.failure: str | None = None
        self.lost_device: str | None = None
        self.is_due = threading.Event()
        self.ran = threading.Event()

    def notice_work(self) -> None:
        self.notices += 1

    def seconds_until_due(self) -> float | None:
        return 0.0 if self.is_due.is_set() and self.failure is None else None

    def step(self) -> None:
        self.steps += 1
        if self.steps % 3 == 0:
            self.num_runs += 1
            if self.num_runs == 2:
                self.failure = "the model computes nonsense" if self.fails else None
                self.is_due.clear()
                self.ran.set()


async def test_an_idle_test_runs_between_requests_and_is_counted(rig: Rig) -> None:
    idle = CountedTest()
    engine = AsyncEngine(rig.engine, max_requests=4, idle_test=idle)
    idle.is_due.set()
    engine.start()
    await asyncio.to_thread(idle.ran.wait, 30)
    assert await tokens_of(engine.admit(call("a", PROMPT))) == greedy_continuation(PROMPT, 4)
    assert engine.stats().self_tests == 2
    assert engine.stats().self_test_failures == 0
    assert engine.healthy
    assert idle.notices >= 1
    assert await engine.close()


async def test_an_idle_test_that_fails_makes_the_engine_unhealthy_and_refuse_requests(rig: Rig) -> None:
    idle = CountedTest(fails=True)
    engine = AsyncEngine(rig.engine, max_requests=4, idle_test=idle)
    idle.is_due.set()
    engine.start()
    await asyncio.to_thread(idle.ran.wait, 30)
    while not engine.stats().self_test_failures:
        await asyncio.sleep(0)
    assert not engine.healthy
    assert not engine.ready
    with pytest.raises(UnavailableError, match="nonsense"):
        engine.admit(call("a", PROMPT))
    assert await engine.close()


async def test_an_engine_is_lost_when_an_idle_test_finds_its_device_lost(rig: Rig) -> None:
    idle = CountedTest(fails=True)
    idle.lost_device = "the device has failed for good"
    engine = AsyncEngine(rig.engine, max_requests=4, idle_test=idle)
    idle.is_due.set()
    engine.start()
    async with asyncio.timeout(30):
        assert await engine.until_lost() == "the device has failed for good"
    await engine.close()


async def test_an_engine_whose_thread_has_died_is_lost(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AsyncEngine(rig.engine, max_requests=4)
    engine.start()
    break_thread(rig, monkeypatch)
    engine.admit(call("a", PROMPT))
    async with asyncio.timeout(30):
        assert "thread has ended" in await engine.until_lost()
    await engine.close()
