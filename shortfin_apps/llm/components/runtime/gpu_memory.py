"""How much of a GPU's memory a server may still allocate; an APU's GPU takes it from the host's.

An APU has two pools in the same DRAM: a carve-out (VRAM) that firmware reserves, and GTT, which is the host's
memory, given out on demand. One of the two serves all allocations: since Linux 6.10 the larger one, before it
the carve-out. What HIP reports for an APU differs by release: the carve-out although GTT is used, the sum of
both, or more free than total. So the kernel's figures are used, and of GTT no more than the host can spare,
because the kernel would end processes to provide the rest.

Sources: hipMemGetInfo and hipDeviceGetPCIBusId of hip_runtime_api.h, cuMemGetInfo of cuda.h; Linux's
documentation "AMDGPU driver", memory statistics; Linux's commit 89773b85599a, and `apu_prefer_gtt` of its
amdgpu driver. On what HIP reports: github.com/ROCm/hip/issues/3892, ROCm/legacy-rocm-build/issues/6004.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shortfin_apps.llm.components.runtime.gpu_chip import gpu_chip
from shortfin_apps.llm.components.runtime.memory import HIP, loaded_library, spare_host_bytes
from shortfin_apps.llm.contract.gpu_code.chips import CHIPS

PCI_DEVICES = Path("/sys/bus/pci/devices")

# A tenth of a GPU's memory is left for buffers of entries of dynamic shape, and for freed buffers that IREE
# keeps.
_SHARE_FOR_OTHERS = 10
_GTT_SINCE = (6, 10)  # the Linux release in which allocations of APUs began to use GTT
_PCI_BUS_ID_BYTES = 32  # more than "0000:c4:00.0" takes

GetInfo = Callable[[Any, Any], int]  # hipMemGetInfo, cuMemGetInfo: free and total bytes, by reference


def spare_gpu_bytes(get_info: GetInfo) -> int | None:
    """Return the GPU's free memory minus a tenth of its total, or None if the driver call fails."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    if get_info(ctypes.byref(free), ctypes.byref(total)) != 0:
        return None
    return _left(total.value, free.value)


def spare_hip_bytes(ordinal: int) -> int | None:
    """Return the memory that may still be allocated on the AMD GPU `ordinal`, in bytes.

    A tenth of the GPU's memory is left for others. None if HIP is not loaded or fails.
    """
    library = loaded_library(HIP)
    if library is None:
        return None
    if _is_apu(ordinal) and (device := _pci_device(library, ordinal)) is not None:
        spare = spare_apu_bytes(device)
        if spare is not None:
            return spare

    def ask() -> int | None:
        if library.hipSetDevice(ordinal) != 0:
            return None
        return spare_gpu_bytes(library.hipMemGetInfo)

    with ThreadPoolExecutor(1) as thread:  # HIP's current device is per thread
        return thread.submit(ask).result()


def spare_apu_bytes(device: Path) -> int | None:
    """Return the bytes that may still be allocated on an APU, from the kernel's folder of its GPU.

    None if the kernel does not report both pools.
    """
    vram, gtt = _pool(device, "vram"), _pool(device, "gtt")
    if vram is None or gtt is None:
        return None
    if vram[0] >= gtt[0] or _linux_release() < _GTT_SINCE:
        return _left(*vram)
    host = spare_host_bytes()
    return _left(*gtt) if host is None else min(_left(*gtt), host)


def _left(total: int, free: int) -> int:
    return max(0, free - total // _SHARE_FOR_OTHERS)


def _pool(device: Path, name: str) -> tuple[int, int] | None:
    """Return the total and the free bytes of the pool "vram" or "gtt"."""
    try:
        total, used = (int((device / f"mem_info_{name}_{kind}").read_text()) for kind in ("total", "used"))
    except (OSError, ValueError):
        return None
    return total, total - used


def _is_apu(ordinal: int) -> bool:
    chip = CHIPS.get(gpu_chip("hip", ordinal) or "")
    return chip is not None and chip.is_unified


def _pci_device(library: Any, ordinal: int) -> Path | None:
    """Return the kernel's folder of the AMD GPU `ordinal`, or None if the driver call fails."""
    name = ctypes.create_string_buffer(_PCI_BUS_ID_BYTES)
    if library.hipDeviceGetPCIBusId(name, _PCI_BUS_ID_BYTES, ordinal) != 0:
        return None
    return PCI_DEVICES / os.fsdecode(name.value).lower()


def _linux_release() -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(found[1]), int(found[2])) if found else (0, 0)
