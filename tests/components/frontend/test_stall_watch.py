from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shortfin_apps.llm.components.frontend.async_engine import STALL_TIMEOUT_S, AsyncEngine
from shortfin_apps.llm.components.recorder.dump_file import read_dump
from shortfin_apps.llm.components.recorder.dumps import DeviceFacts, Dumps, RecorderOptions
from shortfin_apps.llm.components.recorder.flight_recorder import FlightRecorder
from shortfin_apps.llm.components.recorder.records import Run
from shortfin_apps.llm.components.request.messages import FinishReason
from shortfin_apps.llm.errors import UnavailableError
from tests.components.device_gate import Gate
from tests.components.engine_fixture import Rig, call, make_rig
from tests.components.frontend.streams import PROMPT, tokens_of, until_idle
from tests.components.stepped_engine import SteppedClock

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
    facts = DeviceFacts(device="fake", num_pages=32, num_window_pages=0, stride=4)
    dumps = Dumps(recorder, RecorderOptions(directory=tmp_path), facts, start=lambda work: work())
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
