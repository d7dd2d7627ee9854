from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from shortfin_apps.llm.abi import EntryFamily
from shortfin_apps.llm.bench.roofline.cases import Case, Plan, make_batch
from shortfin_apps.llm.bench.roofline.counts import Counts, Limits, count
from shortfin_apps.llm.bench.roofline.floors import Work
from shortfin_apps.llm.components.batching.batch import Batch
from shortfin_apps.llm.errors import InvocationError

PLAN = Plan(EntryFamily.DECODE, 1, 1, 5)
BATCH = make_batch(PLAN, 4)
FIRST, SECOND = Case("decode_bs1", PLAN, BATCH), Case("decode_bs2", PLAN, BATCH)
WORK = Work(num_bytes=100, flops=40)
LIMITS = Limits("a chip", bytes_per_s=10.0, flops_per_s=4.0)


@dataclass
class Kernel:
    launches: int = 2
    unique_loaded_bytes: int = 100
    unique_stored_bytes: int = 20
    matrix_operations: int = 30
    lds_conflict_cycles: int = 7


class Gpu:
    """Each run is of two kernels; what came before `clear` does not count."""

    def __init__(self, *found: str) -> None:
        self.found = found
        self.kernels: list[Kernel] = [Kernel()]

    def clear(self) -> None:
        self.kernels = []

    def counts(self) -> Sequence[Kernel]:
        return self.kernels

    def findings(self) -> Sequence[str]:
        return self.found

    def run(self, batch: Batch) -> None:
        self.kernels += [Kernel(), Kernel(launches=1, unique_loaded_bytes=30)]


def test_the_kernels_of_one_invocation_are_summed() -> None:
    gpu, begun = Gpu(), list[str]()
    results = count([(FIRST, WORK), (SECOND, WORK)], gpu, gpu, lambda case: begun.append(case.entry))
    assert begun == ["decode_bs1", "decode_bs2"]
    expected = {"launches": 3, "num_bytes": 170, "matrix_flops": 120, "lds_conflict_cycles": 14}
    assert results == [Counts(FIRST, WORK, **expected), Counts(SECOND, WORK, **expected)]


def test_counts_are_compared_with_the_floor() -> None:
    counts = Counts(FIRST, WORK, launches=1, num_bytes=150, matrix_flops=80, lds_conflict_cycles=0)
    assert (counts.bytes_ratio, counts.matrix_ratio) == (1.5, 2.0)


@pytest.mark.parametrize(("num_bytes", "matrix_flops", "seconds"), [(150, 0, 15), (10, 80, 20), (10, 0, 10)])
def test_the_shortest_time_is_that_of_bytes_or_flops(
    num_bytes: int, matrix_flops: int, seconds: float
) -> None:
    """What matrix units do not compute, others must: no fewer FLOPs than the floor's."""
    counts = Counts(FIRST, WORK, 1, num_bytes, matrix_flops, 0)
    assert counts.shortest_s(LIMITS) == seconds


def test_counts_of_kernels_that_do_something_wrong_are_not_given() -> None:
    gpu = Gpu("lds_race by softmax")
    with pytest.raises(InvocationError, match=r"decode_bs1.*lds_race by softmax"):
        count([(FIRST, WORK)], gpu, gpu, lambda case: None)
