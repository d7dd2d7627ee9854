"""Memory of the host: how much a server may still allocate, and huge pages; libraries mapped into it.

Weights and KV pages are read sequentially, limited by memory bandwidth. With memory pages of 4 KiB, much of
the time goes to address translation, especially in a virtual machine, where a sequential read was measured at
24 GB/s, and at 34 GB/s with huge pages. With the usual setting, `madvise`, Linux provides huge pages only on
request.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MEMINFO, MAPS = Path("/proc/meminfo"), Path("/proc/self/maps")
CGROUP = Path("/sys/fs/cgroup")

# Half of a host's free memory is left for other programs.
_HOST_SHARE_FOR_OTHERS = 2

HIP = "libamdhip64.so"


def spare_host_bytes() -> int | None:
    """Return half of the memory available to this process, or None if that is unknown."""
    try:
        lines = MEMINFO.read_text().split("\n")
    except OSError:
        return None
    available = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
    known = [size for size in (available, _left_in_cgroup()) if size is not None]
    return min(known) // _HOST_SHARE_FOR_OTHERS if known else None


def loaded_library(name: str) -> ctypes.CDLL | None:
    """Return the library of that name if this process has already loaded it from any path, else None."""
    lines = os.fsdecode(MAPS.read_bytes()).split("\n")  # a path may contain other line separators
    paths = {line.split(maxsplit=5)[-1] for line in lines if line}
    found = sorted(path for path in paths if Path(path).name.startswith(name))
    return ctypes.CDLL(found[0]) if found else None


def _left_in_cgroup() -> int | None:
    """Return the bytes left in the control group (v2), or None if there is no limit."""
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - int(used))


HUGE_PAGE = 2 << 20  # bytes, on x86-64 and most other architectures


def use_huge_pages(memory: npt.NDArray[Any]) -> None:
    """Request huge pages for `memory`, which must be untouched; no effect if smaller than a huge page."""
    begin = -(-memory.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (memory.ctypes.data + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and end - begin >= HUGE_PAGE:
        # A kernel without huge pages returns an error; memory pages then stay small.
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(mmap.MADV_HUGEPAGE)
        )


def empty_bytes(size: int) -> npt.NDArray[np.uint8]:
    """Allocate `size` untouched bytes, aligned to a memory page, in huge pages if possible."""
    memory = np.empty(size + mmap.PAGESIZE, np.uint8)
    first = -memory.ctypes.data % mmap.PAGESIZE
    aligned = memory[first : first + size]
    use_huge_pages(aligned)
    return aligned
