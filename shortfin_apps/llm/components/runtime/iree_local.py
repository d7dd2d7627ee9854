"""The host CPU on iree.runtime, through the driver `local-task`.

Arrays are written and read through memory mappings. On the CPU, this is a copy in memory that takes about a
microsecond. Unlike the binding's own copy, this copy does not release the GIL each time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, cast

import iree.runtime as iree
import numpy as np

from shortfin_apps.llm.components.runtime.device import Array, DeviceBuffer
from shortfin_apps.llm.components.runtime.iree_device import ELEMENTS, IreeBuffer, IreeDevice, never_release
from shortfin_apps.llm.components.runtime.iree_timeline import Fence
from shortfin_apps.llm.components.runtime.memory import empty_bytes, spare_host_bytes, use_huge_pages
from shortfin_apps.llm.components.runtime.parameters import read_parameters
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.contract.host_cpu import MAX_CPU_WORKERS, default_cpu_workers
from shortfin_apps.llm.contract.iree_release import OF_SHORTFIN, runtime_release

# Time for which an idle worker polls for work before it sleeps. Waking a worker takes longer than a small
# dispatch.
_WORKER_SPIN_US = 100

_BYTE = np.dtype(np.uint8)
_MEMORY = iree.MemoryType.DEVICE_LOCAL | iree.MemoryType.HOST_VISIBLE
_USAGE = iree.BufferUsage.DEFAULT | iree.BufferUsage.MAPPING

# The first opened device fixes the thread count for the process, because the driver reads IREE's flags once.
_driver_lock = threading.Lock()
_threads = 0
_hal_device: Any = None


def open_local_task(threads: int | None = None) -> LocalDevice:
    """Open the host CPU with `threads` workers, by default one per CPU that this process may run on.

    Raises ArtifactError for more than MAX_CPU_WORKERS, and if this process already runs the driver with
    another number of workers.
    """
    if threads is not None and threads > MAX_CPU_WORKERS:
        raise ArtifactError(f"IREE runs at most {MAX_CPU_WORKERS} CPU workers; give `--threads` that or less")
    with _driver_lock:
        if _hal_device is None:
            _create_hal_device(threads or default_cpu_workers())
    if threads not in (None, _threads):
        raise ArtifactError(
            f"this process already runs the CPU driver with {_threads} threads, not {threads}; "
            "the number cannot change until it restarts"
        )
    return LocalDevice(_hal_device)


def _create_hal_device(threads: int) -> None:
    global _hal_device, _threads
    iree.flags.parse_flags(
        # Without this flag, the driver starts one worker per physical core that it recognises.
        f"--task_topology_group_count={threads}",
        f"--task_worker_spin_us={_WORKER_SPIN_US}",
    )
    driver = iree.get_driver("local-task")
    _hal_device = driver.create_device_by_uri("local-task", allocators=["caching"])
    never_release(_hal_device)
    _threads = threads


class LocalBuffer(IreeBuffer):
    """An array in host memory; `written` is the fence of the invocation whose result it is, if it is one."""

    __slots__ = ("written",)

    def __init__(self, view: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        super().__init__(view, shape, dtype)
        self.written: Fence | None = None

    def map_bytes(self) -> Array:
        """Return a writable view of the contents as `uint8[bytes]`; valid while this buffer lives."""
        return cast(Array, self.view.map().asarray((self.num_bytes,), _BYTE))


class LocalDevice(IreeDevice):
    buffer_type = LocalBuffer
    submissions_per_trim = 256  # a trim costs a few page faults

    def __init__(self, hal_device: Any) -> None:
        super().__init__("local-task", hal_device)
        # Since IREE 3.13, a result has memory only once its invocation runs, and nothing that reads the
        # result can be recorded before ("transient buffer has not been committed").
        self._waits_for_arguments = runtime_release() > OF_SHORTFIN

    def allocate(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        stage: int = 0,
        only_dispatches: bool = False,
        on_host: bool = False,
    ) -> LocalBuffer:
        dtype = np.dtype(dtype)
        if only_dispatches:
            return self._allocate_on_page(shape, dtype)
        buffer, array = self._new_buffer(shape, dtype)
        use_huge_pages(array.map_bytes())
        buffer.fill_zero(0, array.num_bytes)
        return array

    def _allocate_on_page(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> LocalBuffer:
        """Allocate page-aligned memory, so that no 4 KiB block of a KV page straddles two memory pages.

        The allocator's own buffers start after a header, so the memory is imported. IREE cannot discard the
        contents of imported memory, as fills and copies require; only dispatches may write the buffer.
        """
        memory = empty_bytes(prod(shape) * dtype.itemsize)
        buffer = self._hal_device.from_dlpack_capsule(memory.__dlpack__()).get_buffer()
        memory.fill(0)
        return LocalBuffer(iree.HalBufferView(buffer, shape, ELEMENTS[dtype]), shape, dtype)

    def spare_bytes(self, stage: int = 0) -> int | None:
        return spare_host_bytes()

    def upload(self, array: Array) -> LocalBuffer:
        _, copy = self._new_buffer(array.shape, array.dtype)
        copy.map_bytes()[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return copy

    def download(self, buffer: DeviceBuffer) -> Array:
        source = cast(LocalBuffer, buffer)
        return source.map_bytes().copy().view(source.dtype).reshape(source.shape)

    def clear(self, buffer: DeviceBuffer, rows: Sequence[int]) -> None:
        target = cast(LocalBuffer, buffer)
        target.map_bytes().reshape(target.shape[0], -1)[list(rows)] = 0

    def result(self, view: Any, written: Fence) -> LocalBuffer:
        buffer = cast(LocalBuffer, super().result(view, written))
        buffer.written = written
        return buffer

    def _prepare(self, arguments: Sequence[DeviceBuffer]) -> None:
        if not self._waits_for_arguments:
            return
        for argument in cast(Sequence[LocalBuffer], arguments):
            if argument.written is not None:
                self._wait(argument.written)

    def _read_parameters(self, paths: Sequence[Path]) -> Any:
        return read_parameters(paths)

    def _wait(self, fence: Fence) -> None:
        try:
            fence.wait()
        except Exception:
            self._timeline.abandon(fence)
            raise

    def _new_buffer(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Any, LocalBuffer]:
        buffer = self._allocator.allocate_buffer(_MEMORY, _USAGE, prod(shape) * dtype.itemsize)
        view = iree.HalBufferView(buffer, shape, ELEMENTS[dtype])
        return buffer, LocalBuffer(view, shape, dtype)
