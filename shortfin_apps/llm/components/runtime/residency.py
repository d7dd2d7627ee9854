"""Checks that a GPU runs all workgroups of a launch at the same time, if these wait for each other.

Such a launch declares how many compute units it needs: one for each workgroup, or for two that have room on
one (`one_launch_tiles` in builder/lowering/triton/tiles.py). Other launches of this process precede or follow
it, as a device executes them one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from pathlib import Path

from shortfin_apps.llm.components.runtime.device import EntrySignature
from shortfin_apps.llm.components.runtime.memory import HIP, loaded_library
from shortfin_apps.llm.contract.errors import ArtifactError

_OF_HIP = 63  # hipDeviceAttributeMultiprocessorCount of hip_runtime_api.h
_OF_CUDA = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT of cuda.h


def check_residency(
    vmfb: Path, entries: Iterable[EntrySignature], compute_units: Callable[[], int | None]
) -> None:
    """Raise ArtifactError if a launch of these entries needs more compute units than the device has.

    `compute_units` returns None if the device does not report them.
    """
    most = max((entry.compute_units or 0 for entry in entries), default=0)
    if not most:
        return
    found = compute_units()
    if found is None or found < most:
        has = "does not report how many it has" if found is None else f"has only {found}"
        raise ArtifactError(
            f"{vmfb}: its small decodes are one launch that needs {most} compute units at the same time, and "
            f"the device {has}; rebuild it with `shortfin-llm build --no-one-launch`"
        )


def hip_compute_units(ordinal: int) -> int | None:
    """Return the compute units of the AMD GPU `ordinal`; None if HIP is not loaded or fails."""
    library = loaded_library(HIP)
    count = ctypes.c_int()
    if library is None or library.hipDeviceGetAttribute(ctypes.byref(count), _OF_HIP, ordinal) != 0:
        return None
    return count.value


def cuda_compute_units(library: ctypes.CDLL) -> int | None:
    """Return the multiprocessors of the GPU of the current CUDA context; None if the driver call fails."""
    device, count = ctypes.c_int(), ctypes.c_int()
    if library.cuCtxGetDevice(ctypes.byref(device)) != 0:
        return None
    if library.cuDeviceGetAttribute(ctypes.byref(count), _OF_CUDA, device) != 0:
        return None
    return count.value
