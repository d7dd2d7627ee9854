"""Counts the memory traffic and matrix operations of entries on the emulated AMD GPU.

    bytes    distinct bytes loaded plus distinct bytes stored, summed over launches: the memory traffic if
             each launch started with cold caches that can hold everything it reads
    matrix   FLOPs of matrix instructions, without vector instructions
    floor    minimum bytes and FLOPs by the cost model in cases.py
    waves    occupancy: waves of a kernel that fit on a SIMD at once (`gpu_code/occupancy.py`), averaged over
             launches

No time is measured. The chip's `Limits` convert bytes and FLOPs to the minimum time that it needs for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.contract.errors import InvalidRequestError, InvocationError
from shortfin_apps.llm.contract.gpu_code.chips import Limits
from shortfin_apps.llm.tools.bench.roofline.cases import Case, Work

if TYPE_CHECKING:
    from emulated_gpu.control import Control, Finding, KernelCounters

_MEMORY_BYTES = 128 << 30  # of the device; the host allocates only what is used


def open_emulated_gpu(chip: str) -> Control:
    """Make this process use an emulated GPU. Callers must not have used HIP before.

    Raises InvalidRequestError if the emulator is not installed or cannot be built.
    """
    try:
        from emulated_gpu.control import Control
        from emulated_gpu.errors import EmulatedGpuError
        from emulated_gpu.library import EmulatedGpu
    except ModuleNotFoundError as error:
        raise InvalidRequestError(
            "the emulated GPU is a package of its own: run `pip install ./emulated_gpu` in a checkout",
            "emulated",
        ) from error
    try:
        os.environ.update(EmulatedGpu(chip, memory_bytes=_MEMORY_BYTES).environment())
        control = Control()
        control.command("unique-bytes 1")
        return control
    except EmulatedGpuError as error:
        raise InvalidRequestError(str(error), "emulated") from error


@dataclass(frozen=True, slots=True)
class KernelLaunches:
    """A kernel's number of launches in one invocation, and its waves per SIMD.

    `waves` is None for a kernel that is not in the VMFB.
    """

    name: str
    launches: int
    waves: float | None


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts of one invocation, and `work`, its minimum by the cost model."""

    case: Case
    work: Work
    launches: int
    num_bytes: int
    matrix_flops: int
    lds_conflict_cycles: int
    kernels: tuple[KernelLaunches, ...] = ()

    @property
    def waves(self) -> float | None:
        """Waves per SIMD, averaged over the launches where they are known; None if there are none."""
        known = [(each.launches, each.waves) for each in self.kernels if each.waves is not None]
        launches = sum(count for count, _ in known)
        return sum(count * waves for count, waves in known) / launches if launches else None

    @property
    def bytes_ratio(self) -> float:
        return self.num_bytes / self.work.num_bytes

    @property
    def matrix_ratio(self) -> float:
        return self.matrix_flops / self.work.flops

    def shortest_s(self, limits: Limits) -> float:
        """Return the minimum time for the counted bytes and the larger of counted and minimum FLOPs."""
        flops = max(self.matrix_flops, self.work.flops)
        return Work(self.num_bytes, flops).floor_s(limits.bytes_per_s, limits.flops_per_s)


def count(
    cases: Sequence[tuple[Case, Work]],
    runner: BatchRunner,
    gpu: Control,
    waves: Mapping[str, float],
    on_case: Callable[[Case], None],
) -> list[Counts]:
    """Run every case once; call `on_case` before each. `waves`: waves per SIMD by kernel name.

    Raises InvocationError if the emulator reports a faulty kernel, whose counts would be meaningless.
    """
    results = []
    for case, work in cases:
        on_case(case)
        gpu.clear_report()
        runner.run(case.batch)
        report = gpu.report()
        if report.findings:
            found = "; ".join(map(_describe, report.findings))
            raise InvocationError(f"`{case.entry}` on the emulated GPU: {found}")
        results.append(_sum(case, work, report.kernels, waves))
    return results


def _describe(finding: Finding) -> str:
    return f"{finding.kind} by {finding.kernel}, {finding.instruction} at {finding.code_address:#x}"


def _sum(case: Case, work: Work, by_name: Mapping[str, KernelCounters], waves: Mapping[str, float]) -> Counts:
    kernels = by_name.values()
    return Counts(
        case,
        work,
        launches=sum(kernel.launches for kernel in kernels),
        num_bytes=sum(kernel.unique_loaded_bytes + kernel.unique_stored_bytes for kernel in kernels),
        matrix_flops=2 * sum(kernel.matrix_operations for kernel in kernels),
        lds_conflict_cycles=sum(kernel.lds_conflict_cycles for kernel in kernels),
        kernels=tuple(
            KernelLaunches(name, kernel.launches, waves.get(name)) for name, kernel in by_name.items()
        ),
    )
