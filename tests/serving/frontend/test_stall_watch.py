from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.recorder.dump_file import read_dump
from shortfin_apps.llm.components.recorder.dumps import Dumps
from shortfin_apps.llm.components.recorder.flight_recorder import FlightRecorder
from shortfin_apps.llm.components.recorder.records import Header, Run
from shortfin_apps.llm.components.request.messages import FinishReason
from shortfin_apps.llm.contract.errors import UnavailableError
from shortfin_apps.llm.serving.frontend.async_engine import STALL_TIMEOUT_S, AsyncEngine
from shortfin_apps.llm.serving.frontend.engine_thread import EngineThread
from shortfin_apps.llm.serving.frontend.stall_watch import CHECKS_PER_STALL, StallWatch
from tests.components.device_gate import Gate
from tests.components.engine_fixture import Rig, call, make_rig
from tests.components.stepped_engine import SteppedClock
from tests.serving.frontend.streams import PROMPT, tokens_of, until_idle

pytestmark = pytest.mark.timeout(60)


async def test_the_engine_is_unhealthy_while_the_device_does_not_answer(rig: Rig) -> None:
    clock = SteppedClock()
    engine = AsyncEngine(rig.engine, max_requests=4, clock=clock)
    assert not engine.healthy
    engine.start()
    assert engine.healthy
    gate = Gate(rig)
    stream = engine.admit(call("a", PROMPT))
    await gate.reached()
    clock.now_s += STALL_TIMEOUT_S / 2
    assert engine.healthy
    clock.now_s += STALL_TIMEOUT_S
    assert not engine.healthy
    gate.open()
    await tokens_of(stream)
    await until_idle(engine)
    clock.now_s += STALL_TIMEOUT_S * 10
    assert engine.healthy
    await engine.close()
    assert not engine.healthy


async def test_a_stall_is_dumped_while_the_device_does_not_answer(tmp_path: Path) -> None:
    clock, recorder = SteppedClock(), FlightRecorder()
    rig = make_rig(recorder=recorder)
    header = Header(device="fake", num_pages=32, num_window_pages=0, stride=4)
    dumps = Dumps(recorder, tmp_path, header, start=lambda work: work())
    engine = AsyncEngine(rig.engine, max_requests=8, stall_timeout_s=0.05, dumps=dumps, clock=clock)
    engine.start()
    gate = Gate(rig)
    stream = engine.admit(call("a", PROMPT))
    await gate.reached()
    clock.now_s += 1.0
    assert (await anext(stream)).error is not None
    [path] = tmp_path.iterdir()
    dump = read_dump(path)
    assert "not answered" in dump.header.reason
    [record] = dump.recording.records
    assert isinstance(record, Run)
    assert record.ended_s is None
    gate.open()
    await engine.close()


async def test_a_stall_answers_every_request_and_refuses_new_ones(rig: Rig) -> None:
    clock = SteppedClock()
    engine = AsyncEngine(rig.engine, max_requests=8, stall_timeout_s=0.05, clock=clock)
    engine.start()
    streams = [engine.admit(call(str(i), PROMPT, max_tokens=50)) for i in range(3)]
    await anext(streams[0])
    gate = Gate(rig)
    await gate.reached()
    streams.append(engine.admit(call("newcomer", PROMPT)))
    clock.now_s += 1.0
    for stream in streams:
        deltas = [delta async for delta in stream]
        assert deltas[-1].finish_reason is FinishReason.ERROR
        assert isinstance(deltas[-1].error, UnavailableError)
    assert (engine.healthy, engine.ready) == (False, False)
    with pytest.raises(UnavailableError, match="not answered"):
        engine.admit(call("later", PROMPT))
    await engine.drain(20)  # no request is left
    gate.open()
    await until_idle(engine)
    assert engine.healthy
    assert engine.stats().pages.leased == 0, "everything is freed once the device answers"
    await engine.close()


async def test_close_does_not_wait_for_a_stuck_device(rig: Rig) -> None:
    clock = SteppedClock()
    closed: list[str] = []
    engine = AsyncEngine(
        rig.engine, max_requests=4, stall_timeout_s=1.0, clock=clock, on_close=lambda: closed.append("closed")
    )
    engine.start()
    gate = Gate(rig)
    stream = engine.admit(call("a", PROMPT))
    await gate.reached()
    assert not await engine.close(patience_s=0)
    clock.now_s += 2.0
    assert not await engine.close()
    assert not closed
    stream.close()
    gate.open()
    await asyncio.to_thread(engine._thread.join)
    assert closed


@dataclass
class Thread:
    """In the place of EngineThread: a turn under way, on the clock that the watch has too."""

    clock: SteppedClock
    turn_began_s: float | None = None

    @property
    def turn_s(self) -> float:
        return 0.0 if self.turn_began_s is None else self.clock.now_s - self.turn_began_s


@dataclass
class Watched:
    """A watch of 10 s, whose checks, one a second, are made by `run`."""

    clock: SteppedClock = field(default_factory=SteppedClock)
    stalls: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.thread = Thread(self.clock)
        self.watch = StallWatch(
            cast(EngineThread, self.thread),
            10.0,
            on_stall=lambda _: self.stalls.append(self.thread.turn_s),
            loop_clock=self.clock,
        )

    def begin_turn(self) -> None:
        self.thread.turn_began_s = self.clock.now_s

    def run(self, seconds: float) -> None:
        """The event loop runs for this long."""
        left_s, interval_s = seconds, 10.0 / CHECKS_PER_STALL
        while left_s > 0:
            self.clock.now_s += min(interval_s, left_s)
            left_s -= interval_s
            self.check()

    def suspend(self, seconds: float) -> None:
        """Nothing of the process runs; its timers are late."""
        self.clock.now_s += seconds

    def check(self) -> None:
        self.watch._check_stall()
        self.watch.stop()


@pytest.fixture
def watched() -> Watched:
    return Watched()


async def test_a_suspension_is_not_blamed_on_the_device(watched: Watched) -> None:
    watched.run(3)
    watched.begin_turn()
    watched.run(4)
    watched.suspend(1000)
    assert not watched.watch.stalled, "also for whoever asks before the next check"
    watched.watch.check_available()
    watched.check()
    watched.suspend(1000)
    watched.check()
    watched.run(2)
    assert not watched.stalls
    watched.run(4)
    assert len(watched.stalls) == 1
    assert watched.watch.stalled


async def test_a_turn_is_told_once_and_the_next_again(watched: Watched) -> None:
    for told in (1, 2):
        watched.begin_turn()
        watched.run(30)
        assert len(watched.stalls) == told
    watched.thread.turn_began_s = None
    assert not watched.watch.stalled


async def test_an_idle_engine_that_was_suspended_counts_its_next_turn_from_its_start(
    watched: Watched,
) -> None:
    watched.run(2)
    watched.suspend(500)
    watched.begin_turn()
    watched.run(12)
    assert [round(turn_s) for turn_s in watched.stalls] == [12]


@given(st.lists(st.tuples(st.sampled_from(["run", "suspend"]), st.floats(0, 40)), max_size=12))
def test_only_time_in_which_the_loop_ran_counts(parts: list[tuple[str, float]]) -> None:
    """A stall is told after 10 s of it, give or take a check for each suspension."""

    async def play() -> None:
        watched = Watched()
        watched.begin_turn()
        for kind, seconds in parts:
            getattr(watched, kind)(seconds)
        ran_s = sum(seconds for kind, seconds in parts if kind == "run")
        slack_s = 2.0 + sum(kind == "suspend" for kind, _ in parts)
        if ran_s > 10 + slack_s:
            assert watched.watch.stalled
        if ran_s < 10 - slack_s:
            assert not watched.stalls
            assert not watched.watch.stalled

    asyncio.run(play())


async def test_streams_go_on_after_a_suspension(rig: Rig) -> None:
    clock = SteppedClock()
    engine = AsyncEngine(rig.engine, max_requests=4, clock=clock)
    engine._stalls._loop_clock = clock
    engine.start()
    gate = Gate(rig)
    stream = engine.admit(call("a", PROMPT))
    await gate.reached()
    clock.now_s += 10 * STALL_TIMEOUT_S
    engine._stalls._check_stall()
    assert engine.healthy
    gate.open()
    assert len(await tokens_of(stream)) == 4
    await engine.close()
