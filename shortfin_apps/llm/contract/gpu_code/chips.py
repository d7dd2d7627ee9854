"""AMD GPUs that models are built for, one row each: what code, tiles, occupancy and rooflines depend on.

Sources: LLVM's "User Guide for AMDGPU Backend" (ELF header) and its `AMDGPUBaseInfo.cpp` (sizes of the
register files and of LDS, allocation granules, barriers); AMD's data sheets (compute units, peaks). Where a
data sheet has no peak, as for APUs, it is the matrix FLOPs per clock of a compute unit times clock and units.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

Fp8Type = Literal["f8E4M3FN", "f8E4M3FNUZ"]  # OCP's E4M3, and gfx942's variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resources of a chip. `vgprs` and `waves` are per SIMD; LDS bytes and `barriers` are per CU.

    A VGPR has a value for each lane of a wave. VGPRs and LDS are allocated in granules. A workgroup of
    several waves uses one barrier. `has_wgp`: two CUs of two SIMDs each form a WGP, across which one
    workgroup can run.
    """

    vgprs: int
    vgpr_granule: int
    waves: int
    lds_bytes: int
    lds_granule: int
    barriers: int = 16
    has_wgp: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """A product's peaks: memory bandwidth, and dense bf16 FLOP/s of the matrix units."""

    product: str
    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A GPU chip.

    `number` identifies it in code objects (EF_AMDGPU_MACH). `units`: compute units of the smallest product
    with the chip. `fp8`: the 8-bit float type of its matrix instructions, None without such. `limits`: of
    the fastest product. `is_unified`: the chip shares the CPU's memory (APU).
    """

    name: str
    number: int
    units: int
    resources: Resources
    limits: Limits
    fp8: Fp8Type | None = None
    is_unified: bool = False

    @property
    def lanes(self) -> int:
        """Lanes of a wave for which our kernels are compiled."""
        return 32 if self.resources.has_wgp else 64


_CDNA = Resources(vgprs=512, vgpr_granule=8, waves=8, lds_bytes=64 << 10, lds_granule=512)
# RDNA's VGPR counts are for waves of 32 lanes; for waves of 64 lanes, number and granule are half as large.
_RDNA = Resources(vgprs=1536, vgpr_granule=24, waves=16, lds_bytes=64 << 10, lds_granule=512, has_wgp=True)
_SMALL_RDNA = replace(_RDNA, vgprs=1024, vgpr_granule=16)

CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        chip.name: chip
        for chip in (
            Chip(
                name="gfx90a",
                number=0x3F,
                units=104,  # MI210
                resources=_CDNA,
                limits=Limits("one die of an MI250X", 1.6e12, 191e12),
            ),
            Chip(
                name="gfx942",
                number=0x4C,
                units=228,  # MI300A
                resources=_CDNA,
                limits=Limits("MI300X", 5.3e12, 1307e12),
                fp8="f8E4M3FNUZ",
            ),
            Chip(
                name="gfx950",
                number=0x4F,
                units=256,  # MI350X
                resources=replace(_CDNA, lds_bytes=160 << 10, lds_granule=1280),
                limits=Limits("MI355X", 8e12, 2517e12),
                fp8="f8E4M3FN",
            ),
            Chip(
                name="gfx1100",
                number=0x41,
                units=80,  # RX 7900 GRE
                resources=_RDNA,
                limits=Limits("RX 7900 XTX", 0.96e12, 123e12),
            ),
            Chip(
                name="gfx1101",
                number=0x46,
                units=48,  # PRO W7700
                resources=_RDNA,
                limits=Limits("RX 7800 XT", 0.624e12, 75e12),
            ),
            Chip(
                name="gfx1103",
                number=0x44,
                units=4,  # Radeon 740M
                resources=_SMALL_RDNA,
                limits=Limits("Radeon 780M", 0.12e12, 16.6e12),
                is_unified=True,
            ),
            Chip(
                name="gfx1150",
                number=0x43,
                units=12,  # Radeon 880M
                resources=_SMALL_RDNA,
                limits=Limits("Radeon 890M", 0.128e12, 23.8e12),
                is_unified=True,
            ),
            Chip(
                name="gfx1151",
                number=0x4A,
                units=16,  # Radeon 8040S
                resources=_RDNA,
                limits=Limits("Radeon 8060S", 0.256e12, 59.4e12),
                is_unified=True,
            ),
            Chip(
                name="gfx1200",
                number=0x48,
                units=28,  # RX 9060
                resources=_RDNA,
                limits=Limits("RX 9060 XT", 0.32e12, 103e12),
                fp8="f8E4M3FN",
            ),
            Chip(
                name="gfx1201",
                number=0x4E,
                units=48,  # RX 9070 GRE
                resources=_RDNA,
                limits=Limits("RX 9070 XT", 0.64e12, 195e12),
                fp8="f8E4M3FN",
            ),
        )
    }
)
# IREE 3.9 and 3.13 cannot compile for these.
WITHOUT_COMPILER = ("gfx1102", "gfx1152", "gfx1153")
BY_NUMBER: Mapping[int, Chip] = MappingProxyType({chip.number: chip for chip in CHIPS.values()})


def nearest(name: str) -> str | None:
    """Return the known chip most like `name`, of the same generation; None if no such chip is known."""
    of_generation = [known for known in CHIPS if known[:5] == name[:5]]
    return max(of_generation, key=lambda known: known[:-1] == name[:-1], default=None)
