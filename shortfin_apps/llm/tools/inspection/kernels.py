"""Facts about the kernels of a VMFB, from their metadata and their machine code, and remarks on them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.contract.gpu_code.code_object import read_code_objects
from shortfin_apps.llm.contract.gpu_code.occupancy import waves_per_simd

if TYPE_CHECKING:
    from emulated_gpu.machine_code.code_object import Kernel

_MATRIX = re.compile(r"v_s?(mfma|mfmac|wmma|swmmac)_")
# The last part of a load's name is the size per lane, in the spelling of CDNA or RDNA.
_LOAD = re.compile(
    r"(?:global|flat|buffer)_load_(?:lds_)?(?:d16_(?:hi_)?)?"
    r"(?:(?P<dwords>dword(?:x(?P<count>\d))?)|(?P<short>[us]short|short)|(?P<byte>[us]byte)|[bui](?P<bits>\d+))"
    r"(?:_d16(?:_hi)?)?"
)
_AROUND_OPERATION = re.compile(r"^.*?_dispatch_\d+_?|_dispatch_tensor_store$")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFacts:
    """A kernel; registers and scratch bytes are per lane, LDS per workgroup.

    `num_vgprs` includes accumulation registers where the two share a register file (gfx90a and later).
    `loads` are the code's loads from global memory: bytes per lane, and the number of such instructions; one
    in a loop counts once. `waves` is the number of waves that a SIMD holds at once (occupancy.py).
    """

    name: str
    workgroup: tuple[int, int, int] | None
    lanes: int
    num_vgprs: int
    num_agprs: int
    num_sgprs: int
    num_vgpr_spills: int
    num_sgpr_spills: int
    lds_bytes: int
    scratch_bytes: int
    waves: float
    num_instructions: int
    num_matrix_instructions: int
    loads: tuple[tuple[int, int], ...]

    @property
    def operation(self) -> str:
        """The part of IREE's kernel name that describes the computation."""
        return _AROUND_OPERATION.sub("", self.name) or self.name

    @property
    def widest_load(self) -> int | None:
        return max((width for width, _ in self.loads), default=None)

    @property
    def commonest_load(self) -> int | None:
        """The most frequent load size in bytes; the larger one on a tie."""
        return max(((count, width) for width, count in self.loads), default=(0, None))[1]


@dataclass(frozen=True, slots=True)
class GpuCode:
    """The kernels of a VMFB for AMD GPUs, by code object, in order.

    IREE's own kernels share one code object; each separately compiled kernel has its own.
    """

    chip: str
    code_objects: tuple[tuple[KernelFacts, ...], ...]

    @property
    def kernels(self) -> tuple[KernelFacts, ...]:
        return tuple(chain.from_iterable(self.code_objects))


def read_kernels(vmfb: Path) -> GpuCode | None:
    """Returns the kernels in a VMFB, or None if it has no AMD machine code.

    Raises ArtifactError for a chip with an unknown instruction set, and for code objects of several chips.
    """
    found = read_code_objects(vmfb.read_bytes())
    if not found:
        return None
    chips = sorted({each.chip for each in found})
    if len(chips) > 1:
        raise ArtifactError(f"{vmfb}: has code for {' and '.join(chips)}; compile it for one chip")
    return GpuCode(chips[0], tuple(tuple(facts_of(k, each.chip) for k in each.kernels) for each in found))


def facts_of(kernel: Kernel, chip: str) -> KernelFacts:
    """Reads the kernel's metadata, and counts the instructions of its code for `chip`."""
    mnemonics = _mnemonics(kernel, chip)
    return KernelFacts(
        name=kernel.name,
        workgroup=kernel.workgroup,
        lanes=kernel.lanes,
        num_vgprs=kernel.num_vgprs,
        num_agprs=kernel.num_agprs,
        num_sgprs=kernel.num_sgprs,
        num_vgpr_spills=kernel.num_vgpr_spills,
        num_sgpr_spills=kernel.num_sgpr_spills,
        lds_bytes=kernel.descriptor.lds_bytes,
        scratch_bytes=kernel.descriptor.scratch_bytes,
        waves=waves_per_simd(kernel, chip),
        num_instructions=mnemonics.total(),
        num_matrix_instructions=sum(n for name, n in mnemonics.items() if _MATRIX.match(name)),
        loads=_loads(mnemonics),
    )


def _mnemonics(kernel: Kernel, chip: str) -> Counter[str]:
    # These import the instruction tables, which takes a second.
    from emulated_gpu.machine_code.decode import decode
    from emulated_gpu.machine_code.formats import INSTRUCTION_SETS

    return Counter(each.shape.mnemonic for each in decode(kernel.code, kernel.entry, INSTRUCTION_SETS[chip]))


def _loads(mnemonics: Counter[str]) -> tuple[tuple[int, int], ...]:
    loads: Counter[int] = Counter()
    for name, count in mnemonics.items():
        if (width := load_bytes(name)) is not None:
            loads[width] += count
    return tuple(sorted(loads.items()))


def load_bytes(mnemonic: str) -> int | None:
    """Returns the bytes that a lane loads from global memory, or None for other instructions.

    Loads that convert formats (`buffer_load_format_x`), used by graphics, are not counted either.
    """
    match = _LOAD.fullmatch(mnemonic)
    if match is None:
        return None
    if match["dwords"]:
        return 4 * int(match["count"] or 1)
    if match["bits"]:
        return int(match["bits"]) // 8
    return 2 if match["short"] else 1


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
