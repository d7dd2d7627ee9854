from __future__ import annotations

import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.recorder.flight_recorder import FlightRecorder, Recording
from shortfin_apps.llm.components.recorder.records import LastLaunch, Loop, Pages, Run, Step, Task, Turn
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.contract.abi import EntryFamily
from tests.components.engine_fixture import call, make_rig
from tests.components.fake_device import fake_config
from tests.components.fault_schedule import random_arrival
from tests.components.stepped_engine import SteppedClock

ONE_RECORD = 40_000  # bytes, at most, with a request of these tests


def batch_of(*tasks: tuple[Request, list[int], list[int]], start: int = 0) -> Batch:
    """Tasks with their tokens and pages."""
    inputs = [LlmTaskInput(r, tokens, start, start + len(tokens), pages) for r, tokens, pages in tasks]
    return Batch(EntryFamily.PREFILL, tuple(inputs))


def request(request_id: str = "r", prompt: list[int] | None = None) -> Request:
    return Request(call(request_id, prompt or [1, 2, 3]))


def test_a_table_is_recorded_where_it_has_changed() -> None:
    recorder, asked, pages = FlightRecorder(), request(), [4, 7]
    changes = [recorder.run("e", 2, batch_of((asked, [1], pages))).pages]
    changes += [recorder.run("e", 2, batch_of((asked, [1], pages))).pages]
    pages += [9]
    changes += [recorder.run("e", 2, batch_of((asked, [1], pages))).pages]
    other_lease = [5]
    changes += [recorder.run("e", 2, batch_of((asked, [1], other_lease))).pages]
    assert [list(each) for each in changes] == [
        [Pages(1, False, 0, (4, 7))],
        [],
        [Pages(1, False, 2, (9,))],
        [Pages(1, False, 0, (5,))],
    ]


def test_records_older_than_a_minute_are_dropped_and_leave_their_tables() -> None:
    clock = SteppedClock()
    recorder, asked, pages = FlightRecorder(clock=clock), request(), [4]
    for page_id in (5, 6, 7):
        recorder.run("e", 2, batch_of((asked, [1], pages)))
        clock.now_s += 25.0
        pages.append(page_id)
    recorder.run("e", 2, batch_of((asked, [1], pages)))
    recording = recorder.recording()
    assert [record.began_s for record in recording.records] == [25.0, 50.0, 75.0]
    assert list(recording.requests[0].page_ids) == [4]
    assert list(recording.requests[0].token_ids) == [1, 2, 3]


def test_an_invocation_without_an_end_is_recorded_before_it_has_one() -> None:
    recorder = FlightRecorder()
    record = recorder.run("e", 2, batch_of((request(), [1], [4])))
    assert recorder.recording().records == [record]
    assert record.ended_s is None
    recorder.ended(record, RuntimeError("broken"))
    assert (record.error, record.ended_s is None) == ("RuntimeError: broken", False)


def test_requests_that_no_record_is_about_are_forgotten() -> None:
    clock = SteppedClock()
    recorder = FlightRecorder(clock=clock)
    for number in range(300):
        recorder.run("e", 2, batch_of((request(str(number)), [1], [4])))
        clock.now_s += 1.0
    assert len(recorder.recording().requests) < 60 + 1 + 64


@given(seed=st.integers(0, 10**6), max_bytes=st.integers(1, 100_000))
def test_it_stays_within_its_bytes_whatever_happens(seed: int, max_bytes: int) -> None:
    rng, recorder = random.Random(seed), FlightRecorder(max_bytes=max_bytes)
    rig = make_rig(fake_config(pages=40), loop_sizes=rng.choice([(), (1, 8)]), recorder=recorder)
    for number in range(12):
        rig.engine.add(random_arrival(rng, str(number))[0])
        for _ in range(rng.randint(0, 9)):
            if rig.engine.has_work:
                rig.step()
            assert recorder.num_bytes <= max_bytes + ONE_RECORD
    rig.run()
    recording = recorder.recording()
    named = {task.request for record in recording.records if isinstance(record, Run) for task in record.tasks}
    assert named <= {known.number for known in recording.requests}


def test_a_full_recorder_does_not_look_at_all_requests_for_each_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, purge = 0, FlightRecorder._purge

    def count(recorder: FlightRecorder) -> None:
        nonlocal looks
        looks += len(recorder._seen)
        purge(recorder)

    monkeypatch.setattr(FlightRecorder, "_purge", count)
    recorder, num_records = FlightRecorder(max_bytes=500_000), 2_000
    for number in range(num_records):
        recorder.run("e", 2, batch_of((request(str(number)), [1], [4])))
    num_known = len(recorder.recording().requests)
    assert 100 < num_known < num_records // 2, "it was full"
    assert looks < 100 * num_records


def test_turns_say_who_was_answered() -> None:
    recorder = FlightRecorder()
    rig = make_rig(recorder=recorder)
    rig.engine.add(call("a", [1, 2], max_tokens=1))
    rig.run()
    turns = [record for record in recorder.recording().records if isinstance(record, Turn)]
    assert [ended for turn in turns for ended in turn.ended] == [("a", "length")]


@pytest.mark.parametrize("what", ["fails", "nan", "bug"])
def test_the_engine_tells_of_faults(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, reasons = FlightRecorder(), list[str]()
    recorder.on_fault = reasons.append
    rig = make_rig(recorder=recorder)
    rig.engine.add(call("a", [1, 2], max_tokens=3))

    def fail(entry: str) -> None:
        raise RuntimeError("broken")

    if what == "fails":
        rig.program.faults.before = fail
    elif what == "nan":
        rig.program.faults.spoil = lambda row: True
    if what == "bug":
        rig.engine.fail_all(RuntimeError("a bug"))  # type: ignore[arg-type]
    else:
        rig.step()
    expected = {"fails": "broken", "nan": "row of NaN", "bug": "outside an invocation"}
    [reason] = reasons
    assert expected[what] in reason


def test_other_threads_may_copy_it_while_it_is_written() -> None:
    recorder = FlightRecorder(max_bytes=20_000)
    stop, failures = threading.Event(), list[Run]()

    def copy() -> None:
        while not stop.is_set():
            recording = recorder.recording()
            known = {request.number for request in recording.requests}
            runs = [record for record in recording.records if isinstance(record, Run)]
            failures.extend(run for run in runs if not {task.request for task in run.tasks} <= known)

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        for number in range(3_000):
            recorder.run("e", 2, batch_of((request(str(number)), [1], [4])))
    finally:
        stop.set()
        thread.join()
    assert not failures


def test_the_last_launch_is_the_first_that_did_not_succeed_after_one_that_did() -> None:
    """Later ones fail with it, or were queued after it."""
    clock = SteppedClock()
    recorder, asked = FlightRecorder(clock=clock), request()
    assert recorder.recording().last_launch(0.0) is None
    spoiled = recorder.run("prefill_bs1", 2, batch_of((asked, [1], [4])))
    recorder.ended(spoiled, RuntimeError("out of memory"))
    done = recorder.run("prefill_bs1", 2, batch_of((asked, [1, 2], [4])))
    recorder.ended(done)
    assert str(recorder.recording().last_launch(2.5)) == (
        "prefill_bs1 with 1 rows and 2 tokens, launched 2.5 s ago, done"
    )
    clock.now_s = 3.0
    hung = recorder.run("extend", 2, batch_of((asked, [3], [4]), (request("s"), [7, 8], [5])))
    recorder.draw("sample_bs2", {}, 2)
    recorder.turn(0.0, num_running=2, num_waiting=0, num_preemptions=0, ended=())
    last = recorder.recording().last_launch(64.0)
    assert last == LastLaunch(
        number=hung.number, entry="extend", rows=2, tokens=3, age_s=61.0, state="running", num_queued=1
    )
    recorder.ended(hung, RuntimeError("lost"))
    recorder.ended(recorder.run("extend", 2, batch_of((asked, [3], [4]))), RuntimeError("lost"))
    last = recorder.recording().last_launch(65.0)
    assert last is not None
    assert (last.number, last.state, last.num_queued) == (hung.number, "failed", 2)


def test_the_last_launch_may_be_a_step_of_a_loop_or_zeroed_pages() -> None:
    loop = Loop(1, [Task(1, 3, [5]), Task(2, 3, [5])], [])
    step = Step(number=1, began_s=0.0, entry="decode_loop_bs2", loop=1, index=4)
    last = Recording([], [loop], [step]).last_launch(0.0)
    assert last is not None
    assert (last.entry, last.rows, last.tokens) == ("decode_loop_bs2", 2, 2)
    recorder = FlightRecorder()
    recorder.clear([3, 4], [7])
    last = recorder.recording().last_launch(0.0)
    assert last is not None
    assert (last.entry, last.rows, last.tokens) == ("clear pages", 3, 0)
