from __future__ import annotations

import pytest

from shortfin_apps.llm.components.batching.batch import Batch
from shortfin_apps.llm.contract.abi import EntryFamily
from shortfin_apps.llm.tools.bench.roofline.cases import Case, Plan, make_batch
from shortfin_apps.llm.tools.bench.roofline.floors import Work
from shortfin_apps.llm.tools.bench.roofline.measure import (
    MIN_RUNS,
    MIN_SAMPLE_S,
    Result,
    Sample,
    measure,
    sample_s,
)

PLAN = Plan(EntryFamily.DECODE, 1, 1, 5)
CASE = Case("decode_bs1", PLAN, make_batch(PLAN, 4))


class Runner:
    """Runs that take the given times, repeated; the first run is not measured."""

    def __init__(self, *times: float) -> None:
        self._times = times
        self.device_s = 0.0
        self.runs = 0

    def run(self, batch: Batch) -> None:
        self.device_s += self._times[self.runs % len(self._times)]
        self.runs += 1


class Steady:
    """A machine of 100 bytes/s and 10 FLOP/s."""

    def bytes_per_s(self, num_bytes: int) -> float:
        return 100.0

    def flops_per_s(self) -> float:
        return 10.0


def test_a_sample_is_the_median_of_runs_after_the_first() -> None:
    runner = Runner(9.0, 1.0, 2.0, 3.0)
    assert sample_s(runner, CASE.batch) == 2.0
    assert runner.runs == 1 + MIN_RUNS


def test_short_runs_are_repeated_until_they_are_long_enough() -> None:
    runner = Runner(MIN_SAMPLE_S / 10)
    sample_s(runner, CASE.batch)
    assert runner.runs in (11, 12)  # the sum of ten tenths may fall short


def test_cases_take_turns() -> None:
    other = Case("decode_bs2", PLAN, CASE.batch)
    turns: list[str] = []
    work = Work(1, 1)
    results = measure(
        [(CASE, work), (other, work)], Runner(1.0), Steady(), 2, lambda case: turns.append(case.entry)
    )
    assert turns == ["decode_bs1", "decode_bs2"] * 2
    assert [len(result.samples) for result in results] == [2, 2]


def test_a_ratio_is_taken_within_a_repeat() -> None:
    """In the second repeat, both the machine and the entry are half as fast."""
    result = Result(CASE, Work(100, 1), (Sample(2.0, 100, 100), Sample(4.0, 50, 100)))
    assert result.ratios == [2.0, 2.0]
    assert (result.time_s, result.min_time_s, result.floor_s) == pytest.approx((3.0, 2.0, 1.5))
    assert result.is_memory_bound
    assert not Result(CASE, Work(1, 100), result.samples).is_memory_bound
