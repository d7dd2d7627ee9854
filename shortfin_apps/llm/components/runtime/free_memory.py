"""Memory that a server may still take: what is free, less what others need of it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MEMINFO, MAPS = Path("/proc/meminfo"), Path("/proc/self/maps")
CGROUP = Path("/sys/fs/cgroup")

# Of a GPU's memory, for what entries of dynamic size allocate, and for freed buffers, which IREE keeps.
_GPU_SHARE_FOR_OTHERS = 10
# Of a host's free memory, as other programs live there.
_HOST_SHARE_FOR_OTHERS = 2

HIP, CUDA = "libamdhip64.so", "libcuda.so"

GetInfo = Callable[[Any, Any], int]  # hipMemGetInfo, cuMemGetInfo: free and total bytes, by reference


def spare_host_bytes() -> int | None:
    """Half of what is available to this process; None where /proc does not tell."""
    try:
        lines = MEMINFO.read_text().split("\n")
    except OSError:
        return None
    available = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
    known = [size for size in (available, _left_in_cgroup()) if size is not None]
    return min(known) // _HOST_SHARE_FOR_OTHERS if known else None


def spare_gpu_bytes(get_info: GetInfo) -> int | None:
    """What is free on the GPU, less a tenth of all its memory; None where the driver does not tell."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    if get_info(ctypes.byref(free), ctypes.byref(total)) != 0:
        return None
    return max(0, free.value - total.value // _GPU_SHARE_FOR_OTHERS)


def spare_hip_bytes(ordinal: int) -> int | None:
    """That of an AMD GPU of this process, by the driver's number."""
    library = loaded_library(HIP)
    if library is None:
        return None

    def ask() -> int | None:
        if library.hipSetDevice(ordinal) != 0:
            return None
        return spare_gpu_bytes(library.hipMemGetInfo)

    with ThreadPoolExecutor(1) as thread:  # HIP's current device is a thread's own
        return thread.submit(ask).result()


def loaded_library(name: str) -> ctypes.CDLL | None:
    """The library that is in this process already, wherever it was found; None if it is not."""
    lines = os.fsdecode(MAPS.read_bytes()).split("\n")  # a path may have any other character
    paths = {line.split(maxsplit=5)[-1] for line in lines if line}
    found = sorted(path for path in paths if Path(path).name.startswith(name))
    return ctypes.CDLL(found[0]) if found else None


def _left_in_cgroup() -> int | None:
    """Bytes that the control group (v2) has left; None without a limit."""
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - int(used))
