from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.batching.batch import Batch
from shortfin_apps.llm.components.runtime.device import DeviceBuffer
from shortfin_apps.llm.components.runtime.open import open_device
from shortfin_apps.llm.contract.abi import EntryFamily
from shortfin_apps.llm.tools.bench.roofline.cases import Case, Plan, Work, make_batch
from shortfin_apps.llm.tools.bench.roofline.measure import (
    MIN_RUNS,
    MIN_SAMPLE_S,
    RUNS,
    SIZE,
    STREAM_ROW_BYTES,
    Machine,
    Result,
    Sample,
    load_machine,
    measure,
    sample_s,
)
from tests.components.fake_device import FakeDevice, FakePending, FakeProgram, fake_config


class Ticking(FakeProgram):
    """Counts its runs and does nothing."""

    def __init__(self) -> None:
        super().__init__(fake_config())
        self.shapes: list[tuple[str, tuple[int, ...]]] = []

    def submit(self, entry: str, arguments: Sequence[DeviceBuffer]) -> FakePending:
        self.shapes.append((entry, arguments[0].shape))
        return FakePending(list)


def clock() -> Iterator[float]:
    """A clock by which runs take 3 s, except the second, which takes 2 s."""
    now = 0.0
    for run in range(100):
        yield now
        now += 2.0 if run == 1 else 3.0
        yield now


def test_speeds_are_of_the_best_run() -> None:
    program, ticks = Ticking(), clock()
    machine = Machine(FakeDevice(program), program, clock=lambda: next(ticks))
    assert machine.bytes_per_s(10 * STREAM_ROW_BYTES) == 10 * STREAM_ROW_BYTES / 2
    assert machine.flops_per_s() == 3 * 2 * SIZE**3 / 3
    assert [entry for entry, _ in program.shapes] == ["stream"] * (1 + RUNS) + ["matmul"] * (1 + RUNS)
    assert program.shapes[0][1][0] == 10


def test_the_probes_compute_the_right_result(tiny_artifact: Artifact) -> None:
    """Runs the real probes: the stream adds up every column, and both speeds are positive."""
    manifest = tiny_artifact.manifest
    assert manifest is not None
    device = open_device()
    machine = load_machine(device, manifest.spec, manifest.options)
    rng = np.random.default_rng(0)
    x = rng.integers(-1000, 1000, (3, STREAM_ROW_BYTES // 4), np.int32)
    sums = machine.row_sums(device.upload(x))
    np.testing.assert_array_equal(device.download(sums), x.sum(axis=1))
    assert machine.bytes_per_s(1) > 0
    assert machine.flops_per_s() > 0


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


def runs_of(*times: float) -> Any:
    return Runner(*times)


class Steady:
    """A machine of 100 bytes/s and 10 FLOP/s."""

    def bytes_per_s(self, num_bytes: int) -> float:
        return 100.0

    def flops_per_s(self) -> float:
        return 10.0


def test_a_sample_is_the_median_of_runs_after_the_first() -> None:
    runner = runs_of(9.0, 1.0, 2.0, 3.0)
    assert sample_s(runner, CASE.batch) == 2.0
    assert runner.runs == 1 + MIN_RUNS


def test_short_runs_are_repeated_until_they_are_long_enough() -> None:
    runner = runs_of(MIN_SAMPLE_S / 10)
    sample_s(runner, CASE.batch)
    assert runner.runs in (11, 12)  # the sum of ten tenths may fall short


def test_cases_take_turns() -> None:
    other = Case("decode_bs2", PLAN, CASE.batch)
    turns: list[str] = []
    work = Work(1, 1)
    results = measure(
        [(CASE, work), (other, work)],
        runs_of(1.0),
        cast(Any, Steady()),
        2,
        lambda case: turns.append(case.entry),
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
