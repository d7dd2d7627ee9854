"""Whatever an engine did, its dump replayed on a fresh device does the same, with the same results."""

from __future__ import annotations

import random
from collections.abc import Collection
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.recorder.dump_file import DumpError
from shortfin_apps.llm.components.recorder.flight_recorder import MAX_BYTES, FlightRecorder, Recording
from shortfin_apps.llm.components.recorder.records import (
    NOT_FINITE_ROW,
    Draw,
    Invocation,
    KnownRequest,
    Logprobs,
    Pages,
    Run,
    Step,
    Task,
)
from shortfin_apps.llm.contract.errors import InvocationError
from shortfin_apps.llm.tools.dump_replay.replay import Verdict
from tests.components.engine_fixture import Rig, call, make_rig
from tests.components.fake_device import FakeProgram, Faults
from tests.components.fault_schedule import Schedule, random_arrival, random_rig
from tests.components.stepped_engine import SteppedClock
from tests.tools.dump_replay.replays import Executed, dump_of, executed_by, fresh_program, replay_of


def undisturbed(seed: int, max_bytes: int = MAX_BYTES) -> tuple[Rig, FlightRecorder]:
    """An engine without faults of any mode and shapes, and its recorder."""
    rng, clock = random.Random(seed), SteppedClock()
    recorder = FlightRecorder(max_bytes=max_bytes, clock=clock)
    rig = random_rig(rng, clock, recorder=recorder)
    if rig.draft is not None:
        rig.draft.program.faults = Faults()
    return rig, recorder


def work(rig: Rig, seed: int) -> None:
    """Requests come, are preempted and aborted, until all have ended."""
    rng = random.Random(seed)
    for number in range(rng.randint(1, 12)):
        asked, _ = random_arrival(rng, str(number))
        rig.engine.add(asked)
        for _ in range(rng.randint(0, 6)):
            if rig.engine.has_work:
                rig.take(rig.engine.step())
        if rng.random() < 0.1 and (last := rig.engine.abort(str(number))) is not None:
            rig.take([last])
        if rng.random() < 0.1:
            rig.engine.flush_cache()
    rig.run()


@given(seed=st.integers(0, 10**6))
def test_a_replay_executes_the_same_entries_with_the_same_arguments(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    rig, recorder = undisturbed(seed)
    executed = executed_by(rig.program)
    work(rig, seed)
    path = tmp_path_factory.mktemp("dumps") / "d"
    program = fresh_program(rig.program)
    replayed = executed_by(program)
    replay = replay_of(dump_of(recorder.recording(), path, rig), program)
    for outcome in replay.run():
        assert outcome.verdict is Verdict.SAME, outcome
    assert replayed == executed
    assert replay.prefilled_tokens == 0
    assert not replay.findings


@given(seed=st.integers(0, 10**6), max_bytes=st.integers(2_000, 30_000))
def test_what_was_computed_before_the_ring_began_is_made_again(
    tmp_path_factory: pytest.TempPathFactory, seed: int, max_bytes: int
) -> None:
    rig, recorder = undisturbed(seed, max_bytes)
    executed = executed_by(rig.program)
    work(rig, seed)
    recording = recorder.recording()
    path = tmp_path_factory.mktemp("dumps") / "d"
    program = fresh_program(rig.program)
    replayed = executed_by(program)
    replay = replay_of(dump_of(recording, path, rig), program)
    invocations = [each for each in recording.records if isinstance(each, Run | Step | Draw | Logprobs)]
    orphans = list(takewhile(lambda record: isinstance(record, Draw | Logprobs), invocations))
    others = [outcome for outcome in replay.run() if outcome.verdict is not Verdict.SAME]
    numbers = {record.number for record in orphans}  # of rows of a batch before the ring
    verdicts = [outcome for outcome in others if outcome.record.number not in numbers]
    if rig.program.config.window_tokens is None:
        assert not verdicts
    assert all(outcome.verdict is Verdict.NOT_COMPARED for outcome in verdicts), verdicts
    assert not replay.findings
    num_made = len(replayed) - (len(invocations) - len(orphans))
    assert num_made >= 0
    assert is_subsequence(executed[len(executed) - len(replayed) + num_made :], replayed)


def is_subsequence(short: Executed, long: Executed) -> bool:
    rest = iter(long)
    return all(any(is_same(each, other) for other in rest) for each in short)


def is_same(executed: tuple[str, dict[str, Any]], replayed: tuple[str, dict[str, Any]]) -> bool:
    """Whether they differ in nothing but tokens that the replay does not know, and takes for 0."""
    entry, arguments = executed
    tokens = replayed[1].get("tokens", 0)
    if tokens and np.shape(tokens) == np.shape(arguments.get("tokens", 0)):
        known_tokens = np.where(np.equal(tokens, 0), 0, arguments["tokens"]).tolist()
        arguments = {**arguments, "tokens": known_tokens}
    return (entry, arguments) == replayed


class Planted:
    """A device whose executions of these numbers fail, or make a row NaN."""

    def __init__(self, program: FakeProgram, failing: Collection[int], spoiled: Collection[int]) -> None:
        self._failing, self._spoiled = failing, spoiled
        self._number = 0
        program.faults.before = self._before
        program.faults.spoil = lambda row: row == 0 and self._number in self._spoiled

    def _before(self, entry: str) -> None:
        self._number += 1
        if self._number in self._failing:
            raise InvocationError("planted")


@given(
    seed=st.integers(0, 10**6),
    failing=st.sets(st.integers(1, 40), max_size=3),
    spoiled=st.sets(st.integers(1, 40), max_size=3),
)
def test_a_fault_of_the_device_is_reproduced_on_one_that_has_it(
    tmp_path_factory: pytest.TempPathFactory, seed: int, failing: set[int], spoiled: set[int]
) -> None:
    """At depth 0: a step that was queued behind a failed one fails unexecuted."""
    rig, recorder = undisturbed(seed)
    rig.engine._pipeline._depth = 0
    Planted(rig.program, failing, spoiled)
    work(rig, seed)
    path = tmp_path_factory.mktemp("dumps") / "d"
    dump = dump_of(recorder.recording(), path, rig)
    program = fresh_program(rig.program)
    Planted(program, failing, spoiled)
    outcomes = list(replay_of(dump, program).run())
    expected = [Verdict.SAME if o.record.error is None else Verdict.REPRODUCED for o in outcomes]
    assert [outcome.verdict for outcome in outcomes] == expected


@pytest.mark.parametrize("seed", range(120))
def test_whatever_a_fault_schedule_did_the_rest_is_the_same_on_a_healthy_device(
    tmp_path: Path, seed: int
) -> None:
    schedule = Schedule(seed)
    recorder = FlightRecorder(seconds=1e9, clock=schedule._clock)
    schedule.rig.runner._recorder = schedule.rig.engine._recorder = recorder
    schedule.run()
    dump = dump_of(recorder.recording(), tmp_path / "d", schedule.rig)
    is_ahead = schedule.rig.engine._pipeline._depth > 0
    for outcome in replay_of(dump, fresh_program(schedule.rig.program)).run():
        record = outcome.record
        if record.error is not None:
            assert outcome.verdict is Verdict.NOT_REPRODUCED
        elif record.ended_s is None:
            assert outcome.verdict is Verdict.UNFINISHED
        elif outcome.verdict is Verdict.NOT_COMPARED:
            assert is_ahead, "only a step that was queued behind a row of NaN has an unknown token"
        elif outcome.verdict is not Verdict.SAME:
            assert outcome.verdict is Verdict.DIFFERS, outcome
            assert has_nan(record), outcome


def has_nan(record: Invocation) -> bool:
    if isinstance(record, Logprobs):
        return NOT_FINITE_ROW in record.masses
    if isinstance(record, Run):
        return NOT_FINITE_ROW in (*record.checksums, *record.logits)
    return isinstance(record, Step | Draw) and -1 in record.token_ids


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        (Task(1, 400, (1,)), "no page for position 400"),
        (Task(1, 0, (1,) * 99), "no page for position 98"),
        (Task(1, 1, (1, 2)), "within a page"),
        (Task(1, 7, (1,)), "no token"),
    ],
)
def test_a_dump_that_points_out_of_its_pages_is_refused(tmp_path: Path, task: Task, problem: str) -> None:
    rig = make_rig()
    known = KnownRequest(1, "r", 0.0, 3, (1, 2, 3), (4, 5, 6), None)
    record = Run(number=1, began_s=0.0, entry="extend", family="extend", blocks=3, tasks=[task])
    dump = dump_of(Recording([known], [], [record]), tmp_path / "d", rig)
    with pytest.raises(DumpError, match=problem):
        list(replay_of(dump, fresh_program(rig.program)).run())


def test_a_page_that_holds_other_tokens_is_found(tmp_path: Path) -> None:
    """As when a page was given to a second request while it was the first one's."""
    recorder = FlightRecorder()
    rig = make_rig(recorder=recorder)
    rig.engine.add(call("a", [1, 2, 3, 4, 5], max_tokens=1))
    rig.run()
    recording = recorder.recording()
    [first] = [record for record in recording.records if isinstance(record, Run)]
    [page_ids] = [each.page_ids for each in first.pages]
    second = Run(
        number=9, began_s=0.0, entry="decode_bs1", family="decode", blocks=2, tasks=[Task(2, 4, (5,))]
    )
    second.pages = [Pages(2, False, 0, page_ids)]
    known = KnownRequest(2, "b", 0.0, 5, (9, 9, 9, 9, 5), (), None)
    requests, records = [*recording.requests, known], [*recording.records, second]
    replay = replay_of(
        dump_of(Recording(requests, [], records), tmp_path / "d", rig), fresh_program(rig.program)
    )
    list(replay.run())
    [finding] = replay.findings
    assert "request b reads block 0" in finding
