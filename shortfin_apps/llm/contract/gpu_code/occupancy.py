"""Number of waves of a kernel that a SIMD holds at once, as far as the kernel itself limits it.

Sources: LLVM's "User Guide for AMDGPU Backend" (kernel descriptor) and its `AMDGPUBaseInfo.cpp` (sizes of the
register files and of LDS, allocation granules, barriers). SGPRs are not counted: the chips here have a fixed
number for each wave, or (gfx9) enough for all but one of eight waves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emulated_gpu.machine_code.code_object import CodeObject, Kernel

_WGP_MODE = 1 << 29  # of compute_pgm_rsrc1: a workgroup may use the two CUs of a WGP
_SIMDS = 4  # per CU on CDNA; per WGP (two CUs) on RDNA


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resources per SIMD: VGPRs (each for as many lanes as a wave has) and waves. LDS is in bytes per CU.

    Registers and LDS are allocated in granules. `barriers` is per CU: a workgroup of several waves uses one.
    `has_wgp` means that two CUs of two SIMDs each form a WGP, which can hold a workgroup together.
    """

    vgprs: int
    vgpr_granule: int
    waves: int
    lds_bytes: int
    lds_granule: int
    barriers: int = 16
    has_wgp: bool = False


_RDNA = Resources(vgprs=1536, vgpr_granule=24, waves=16, lds_bytes=64 << 10, lds_granule=512, has_wgp=True)
# RDNA's register counts are for waves of 32 lanes; a wave of 64 has half as many, in granules half as large.
RESOURCES = {
    "gfx942": Resources(vgprs=512, vgpr_granule=8, waves=8, lds_bytes=64 << 10, lds_granule=512),
    "gfx950": Resources(vgprs=512, vgpr_granule=8, waves=8, lds_bytes=160 << 10, lds_granule=1280),
    "gfx1100": _RDNA,
    "gfx1201": _RDNA,
}


def waves_per_simd(kernel: Kernel, chip: str) -> float:
    """Returns the waves per SIMD at once, averaged over SIMDs that share workgroups: at most 8 or 16.

    A launch with few workgroups, or with LDS allocated at launch, has fewer.
    """
    resources = RESOURCES[chip]
    both_cus = resources.has_wgp and bool(kernel.descriptor.rsrc1 & _WGP_MODE)
    num_simds = _SIMDS // 2 if resources.has_wgp and not both_cus else _SIMDS
    slots = num_simds * _waves_by_registers(kernel, resources)
    waves = -(-_lanes_of_workgroup(kernel) // kernel.lanes)
    groups = slots // waves
    cus = 2 if both_cus else 1
    if waves > 1:
        groups = min(groups, cus * resources.barriers)
    if kernel.descriptor.lds_bytes:
        allocated = _round_up(kernel.descriptor.lds_bytes, resources.lds_granule)
        groups = min(groups, cus * resources.lds_bytes // allocated)
    return max(1, groups) * waves / num_simds


def waves_by_kernel(code_objects: Iterable[CodeObject]) -> Mapping[str, float]:
    """Returns the waves of each kernel by name; the minimum of kernels with the same name."""
    found: dict[str, float] = {}
    for code_object in code_objects:
        for kernel in code_object.kernels:
            waves = waves_per_simd(kernel, code_object.chip)
            found[kernel.name] = min(waves, found.get(kernel.name, waves))
    return found


def _waves_by_registers(kernel: Kernel, resources: Resources) -> int:
    width = 2 if resources.has_wgp and kernel.lanes == 64 else 1
    granule = resources.vgpr_granule // width
    allocated = _round_up(max(1, kernel.num_vgprs), granule)
    return max(1, min(resources.waves, resources.vgprs // width // allocated))


def _lanes_of_workgroup(kernel: Kernel) -> int:
    """Returns the number of lanes of a workgroup; for a kernel without a fixed size, the largest allowed."""
    if kernel.workgroup is None:
        return kernel.max_workgroup
    x, y, z = kernel.workgroup
    return x * y * z


def _round_up(value: int, granule: int) -> int:
    return -(-value // granule) * granule
