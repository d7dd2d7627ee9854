"""What an AMD GPU does in an entry, counted on the emulated one, beside what it must do.

    bytes    of each launch the distinct bytes that its lanes load, and those that they store: what would
             cross the memory bus if every launch began with cold caches that hold all that it reads
    matrix   multiply-adds of matrix instructions; what vector instructions compute is not in it
    floor    floors.py's bytes and FLOPs

No time is counted. `Limits` turn bytes and FLOPs into the shortest time in which the chip could do as much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shortfin_apps.llm.bench.roofline.cases import Case
from shortfin_apps.llm.bench.roofline.floors import Work
from shortfin_apps.llm.components.batching.batch import Batch
from shortfin_apps.llm.errors import InvocationError


@dataclass(frozen=True, slots=True)
class Limits:
    """A product's published peaks: bytes of its memory per second, dense bf16 FLOPs of its matrix units."""

    product: str
    bytes_per_s: float
    flops_per_s: float


# From AMD's data sheets.
LIMITS = {
    "gfx942": Limits("MI300X", 5.3e12, 1307e12),
    "gfx1100": Limits("RX 7900 XTX", 0.96e12, 123e12),
}


class KernelCounts(Protocol):
    """The counters of one kernel that are used here, summed over its launches."""

    @property
    def launches(self) -> int: ...
    @property
    def unique_loaded_bytes(self) -> int: ...
    @property
    def unique_stored_bytes(self) -> int: ...
    @property
    def matrix_operations(self) -> int: ...
    @property
    def lds_conflict_cycles(self) -> int: ...


class Gpu(Protocol):
    """The emulated GPU: its counters since `clear`, and what kernels did wrong, a line each."""

    def clear(self) -> None: ...
    def counts(self) -> Iterable[KernelCounts]: ...
    def findings(self) -> Sequence[str]: ...


class Runner(Protocol):
    """The part of BatchRunner used here."""

    def run(self, batch: Batch) -> object: ...


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one invocation."""

    case: Case
    work: Work
    launches: int
    num_bytes: int
    matrix_flops: int
    lds_conflict_cycles: int

    @property
    def bytes_ratio(self) -> float:
        return self.num_bytes / self.work.num_bytes

    @property
    def matrix_ratio(self) -> float:
        return self.matrix_flops / self.work.flops

    def shortest_s(self, limits: Limits) -> float:
        """As long as the chip takes for these bytes and FLOPs at least."""
        flops = max(self.matrix_flops, self.work.flops)
        return Work(self.num_bytes, flops).floor_s(limits.bytes_per_s, limits.flops_per_s)


def count(
    cases: Sequence[tuple[Case, Work]], runner: Runner, gpu: Gpu, on_case: Callable[[Case], None]
) -> list[Counts]:
    """One invocation of every case; `on_case` is called before each.

    Raises InvocationError if a kernel does something wrong, as its counts would mean nothing.
    """
    results = []
    for case, work in cases:
        on_case(case)
        gpu.clear()
        runner.run(case.batch)
        if found := gpu.findings():
            raise InvocationError(f"`{case.entry}` on the emulated GPU: {'; '.join(found)}")
        results.append(_sum(case, work, list(gpu.counts())))
    return results


def _sum(case: Case, work: Work, kernels: Sequence[KernelCounts]) -> Counts:
    return Counts(
        case,
        work,
        launches=sum(kernel.launches for kernel in kernels),
        num_bytes=sum(kernel.unique_loaded_bytes + kernel.unique_stored_bytes for kernel in kernels),
        matrix_flops=2 * sum(kernel.matrix_operations for kernel in kernels),
        lds_conflict_cycles=sum(kernel.lds_conflict_cycles for kernel in kernels),
    )
