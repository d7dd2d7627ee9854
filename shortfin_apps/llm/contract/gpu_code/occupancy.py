"""Occupancy: how many waves of a kernel fit a SIMD at once, by the kernel's registers, LDS and barriers.

Sources: LLVM's "User Guide for AMDGPU Backend" (kernel descriptor) and its `AMDGPUBaseInfo.cpp`. SGPRs are
not counted: RDNA has a fixed number of SGPRs per wave, and gfx9 has enough SGPRs for all but one of eight
waves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from shortfin_apps.llm.contract.gpu_code.chips import CHIPS, Resources

if TYPE_CHECKING:
    from emulated_gpu.machine_code.code_object import CodeObject, Kernel

_WGP_MODE = 1 << 29  # of compute_pgm_rsrc1: a workgroup may use the two CUs of a WGP
_SIMDS = 4  # per CU on CDNA; per WGP (two CUs) on RDNA


def waves_per_simd(kernel: Kernel, chip: str) -> float:
    """Return the maximum waves per SIMD, averaged over the SIMDs that share a workgroup.

    A launch with few workgroups, or with LDS allocated at launch, has fewer waves.
    """
    resources = CHIPS[chip].resources
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
    """Return the waves per SIMD of each kernel by name; for kernels of the same name, the minimum."""
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
    """Return the number of lanes of a workgroup; the maximum if the kernel has no fixed workgroup size."""
    if kernel.workgroup is None:
        return kernel.max_workgroup
    x, y, z = kernel.workgroup
    return x * y * z


def _round_up(value: int, granule: int) -> int:
    return -(-value // granule) * granule
