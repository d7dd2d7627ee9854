"""Remarks on kernels: reasons to look at one."""

from __future__ import annotations

import re
from enum import StrEnum

from shortfin_apps.llm.tools.inspection.kernels import KernelFacts

# IREE names a matmul's kernel by its sizes M, N and K. With M = 1 it is a product with a vector, which is
# bound by loading its weights.
_MATMUL = re.compile(r"(matmul(?!_1x)|mmt4d|contract|conv|attention)")
_NARROW_BYTES = 2


class Remark(StrEnum):
    """A reason to look at a kernel, most serious first."""

    SPILLS = "spills"
    SCRATCH = "scratch"
    NO_MATRIX = "no matrix"
    NARROW = "narrow loads"
    ONE_LANE = "1 lane"

    @property
    def meaning(self) -> str:
        return _MEANINGS[self]


_MEANINGS = {
    Remark.SPILLS: "registers did not suffice and are saved to memory or to other registers",
    Remark.SCRATCH: "each lane keeps values in scratch, which is global memory",
    Remark.NO_MATRIX: "a matmul of several rows or an attention without matrix instructions",
    Remark.NARROW: f"most loads from global memory are of {_NARROW_BYTES} bytes a lane or less (16 are best)",
    Remark.ONE_LANE: "its workgroup is 1x1x1, so that one lane of a wave computes",
}


def remarks(kernel: KernelFacts) -> tuple[Remark, ...]:
    """Returns the remarks that apply to a kernel, most serious first."""
    common = kernel.commonest_load
    holds = {
        Remark.SPILLS: kernel.num_vgpr_spills + kernel.num_sgpr_spills > 0,
        Remark.SCRATCH: kernel.scratch_bytes > 0,
        Remark.NO_MATRIX: bool(_MATMUL.match(kernel.operation)) and not kernel.num_matrix_instructions,
        Remark.NARROW: common is not None and common <= _NARROW_BYTES,
        Remark.ONE_LANE: kernel.workgroup == (1, 1, 1),
    }
    return tuple(remark for remark in Remark if holds[remark])
