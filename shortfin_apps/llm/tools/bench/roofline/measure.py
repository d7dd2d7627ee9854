"""Alternates timing of cases and machine limits, so that each case has limits measured right after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from shortfin_apps.llm.components.batching.batch import Batch
from shortfin_apps.llm.tools.bench.roofline.cases import Case
from shortfin_apps.llm.tools.bench.roofline.floors import Work

MIN_RUNS = 3
MIN_SAMPLE_S = 0.25  # of back-to-back runs; their median is one sample


class Runner(Protocol):
    """The part of BatchRunner used here: runs a batch and adds the invocation's time to `device_s`."""

    @property
    def device_s(self) -> float: ...

    def run(self, batch: Batch) -> object: ...


class Speeds(Protocol):
    """The part of Machine used here: its current speeds."""

    def bytes_per_s(self, num_bytes: int) -> float: ...

    def flops_per_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """One repeat of one case: the case's time, and the machine's speeds right after it."""

    time_s: float
    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """A case and its samples, one per repeat."""

    case: Case
    work: Work
    samples: tuple[Sample, ...]

    @property
    def time_s(self) -> float:
        return median(sample.time_s for sample in self.samples)

    @property
    def min_time_s(self) -> float:
        return min(sample.time_s for sample in self.samples)

    @property
    def floor_s(self) -> float:
        return median(self._floor_s(sample) for sample in self.samples)

    @property
    def ratios(self) -> list[float]:
        """Time over floor of each repeat."""
        return [sample.time_s / self._floor_s(sample) for sample in self.samples]

    @property
    def is_memory_bound(self) -> bool:
        return self.work.is_memory_bound(
            median(s.bytes_per_s for s in self.samples), median(s.flops_per_s for s in self.samples)
        )

    def _floor_s(self, sample: Sample) -> float:
        return self.work.floor_s(sample.bytes_per_s, sample.flops_per_s)


def measure(
    cases: Sequence[tuple[Case, Work]],
    runner: Runner,
    machine: Speeds,
    repeats: int,
    on_sample: Callable[[Case], None],
) -> list[Result]:
    """Take `repeats` samples of every case, alternating cases; `on_sample` is called before each."""
    samples: dict[int, list[Sample]] = {index: [] for index in range(len(cases))}
    for _ in range(repeats):
        for index, (case, work) in enumerate(cases):
            on_sample(case)
            time_s = sample_s(runner, case.batch)
            samples[index].append(Sample(time_s, machine.bytes_per_s(work.num_bytes), machine.flops_per_s()))
    return [Result(case, work, tuple(samples[index])) for index, (case, work) in enumerate(cases)]


def sample_s(runner: Runner, batch: Batch) -> float:
    """The median time of back-to-back invocations, after one unmeasured."""
    runner.run(batch)
    times: list[float] = []
    while len(times) < MIN_RUNS or sum(times) < MIN_SAMPLE_S:
        before = runner.device_s
        runner.run(batch)
        times.append(runner.device_s - before)
    return median(times)
