"""The CUDA context of an iree.runtime device, on every thread that uses the device.

CUDA's current context is per thread. IREE 3.13 makes its context current on the thread that opens a device,
but needs it on every thread that allocates (`cuda_allocator.c` does not set it).
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from shortfin_apps.llm.components.runtime.free_memory import spare_gpu_bytes


class CudaContext:
    """The context that is current on the creating thread; `library` is the CUDA driver's."""

    def __init__(self, library: Any = None) -> None:
        self._library = library or ctypes.CDLL("libcuda.so.1")
        self._context = ctypes.c_void_p()
        self._check(self._library.cuCtxGetCurrent(ctypes.byref(self._context)))
        self._of_thread = threading.local()
        self._of_thread.entered = True

    def enter(self) -> None:
        """Makes the context current on this thread, unless it already is. Raises RuntimeError."""
        if not getattr(self._of_thread, "entered", False):
            self._check(self._library.cuCtxSetCurrent(self._context))
            self._of_thread.entered = True

    def spare_bytes(self) -> int | None:
        """Returns the GPU memory that may still be allocated. The thread must have entered."""
        return spare_gpu_bytes(self._library.cuMemGetInfo_v2)

    def _check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"CUDA driver error {status} from its context")
