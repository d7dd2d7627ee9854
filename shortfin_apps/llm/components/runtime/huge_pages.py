"""Asks the kernel to back large memory with huge pages.

Weights and KV pages are read front to back at the speed of memory, and with pages of 4 KiB the processor
spends much of that time on address translation, above all in a virtual machine: there a streaming read was
measured at 24 GB/s, with huge pages at 34. Linux gives them to whom asks (`madvise`, its usual setting).
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

HUGE_PAGE = 2 << 20  # bytes; on x86-64, and on most of the others


def use_huge_pages(memory: npt.NDArray[Any]) -> None:
    """Advises for the whole pages of `memory`, which nobody has touched yet; small memory is left alone."""
    begin = -(-memory.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (memory.ctypes.data + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and end - begin >= HUGE_PAGE:
        # A kernel without them refuses, and pages stay small.
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(mmap.MADV_HUGEPAGE)
        )


def empty_bytes(size: int) -> npt.NDArray[np.uint8]:
    """Memory of `size` bytes that begins where a page does, untouched."""
    memory = np.empty(size + mmap.PAGESIZE, np.uint8)
    first = -memory.ctypes.data % mmap.PAGESIZE
    aligned = memory[first : first + size]
    use_huge_pages(aligned)
    return aligned
