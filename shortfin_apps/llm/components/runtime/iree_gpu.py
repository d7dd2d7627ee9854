"""A GPU on iree.runtime: AMD through the driver `hip`, NVIDIA through `cuda`.

An uploaded array stays on the host until an invocation first needs the array. All such arguments of an
invocation are then transferred in one submission, through one piece of staging memory. A thread of its own
makes the submissions of invocations (launch_queue.py); all other work waits until these are made.

On CUDA, an `on_host` buffer is host memory that dispatches write. On AMD GPUs, the host is guaranteed to see
such writes only after a system-scope release, which HIP does not promise for memory that is not fine-grained.
There, an `on_host` buffer is in device memory, and is copied to the host after each invocation.

A driver failure is final: after it, the driver fails all work, or ends the process when it frees what the
failed work used (see shortfin_device.py). Therefore a failed device is neither used again nor released.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any, TypeVar, cast

import iree.runtime as iree
import numpy as np

from shortfin_apps.llm.components.runtime.device import Array, DeviceBuffer, GpuDriver, PollablePending
from shortfin_apps.llm.components.runtime.device_errors import copy_of, lost_error
from shortfin_apps.llm.components.runtime.gpu_choice import select, unavailable, unopenable
from shortfin_apps.llm.components.runtime.gpu_memory import spare_gpu_bytes, spare_hip_bytes
from shortfin_apps.llm.components.runtime.iree_device import ELEMENTS, IreeBuffer, IreeDevice, never_release
from shortfin_apps.llm.components.runtime.iree_staging import IreeStaging, IreeStagingPool
from shortfin_apps.llm.components.runtime.iree_timeline import Fence
from shortfin_apps.llm.components.runtime.launch_queue import LaunchQueue
from shortfin_apps.llm.components.runtime.parameters import stream_parameters
from shortfin_apps.llm.components.runtime.residency import cuda_compute_units, hip_compute_units
from shortfin_apps.llm.contract.errors import ArtifactError, DeviceLostError, InvocationError

T = TypeVar("T")

_MEMORY = int(iree.MemoryType.DEVICE_LOCAL)
_USAGE = int(iree.BufferUsage.DEFAULT)
_ZERO = np.zeros(1, np.uint8)
_ALIGNMENT = 64  # bytes, of each array in staging memory

# Parts of the message of a driver failure; other errors come from programs that refuse their arguments.
_OF_THE_DRIVER = ("HIP driver error", "CUDA driver error", "ABORTED", "was aborted", "RESOURCE_EXHAUSTED")

_devices_lock = threading.Lock()
_hal_devices: dict[tuple[GpuDriver, str], tuple[Any, CudaContext | None]] = {}


def open_gpu(driver: GpuDriver, device_ids: Sequence[str] = ()) -> GpuDevice:
    """Open a GPU by index or by the driver's name, by default the first. Raises ArtifactError."""
    if len(device_ids) > 1:
        raise ArtifactError(
            "one GPU serves a model on the iree runtime; give one of --device-ids, or serve pipeline stages "
            "with `--runtime shortfin`"
        )
    available = available_gpus(driver)
    (name,) = select(driver, device_ids or ("0",), available)
    with _devices_lock:
        if (driver, name) not in _hal_devices:
            made = _create_hal_device(driver, name)
            _hal_devices[driver, name] = made, CudaContext() if driver == "cuda" else None
        return GpuDevice(driver, available.index(name), *_hal_devices[driver, name])


def available_gpus(driver: GpuDriver) -> list[str]:
    """Return the driver's names of all GPUs. Raises ArtifactError if there is none."""
    try:
        found = iree.get_driver(driver).query_available_devices()
    except Exception as error:
        raise unavailable(driver, error) from None
    if not found:
        raise unavailable(driver)
    return [device["path"] for device in found]


def _create_hal_device(driver: GpuDriver, name: str) -> Any:
    try:
        made = iree.get_driver(driver).create_device_by_uri(f"{driver}://{name}", allocators=["caching"])
    except Exception as error:
        raise unopenable(driver, error) from None
    never_release(made)
    return made


class GpuBuffer(IreeBuffer):
    """An array on the GPU; until an invocation first needs the array, it is in `staged` on the host.

    `on_host` is None, or host memory that has the array's contents after each invocation that uses the array.
    """

    __slots__ = ("on_host", "staged")

    def __init__(self, view: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        super().__init__(view, shape, dtype)
        self.staged: Array | None = None
        self.on_host: IreeStaging | None = None

    @property
    def hal(self) -> Any:
        return self.view.get_buffer()


class GpuDevice(IreeDevice):
    buffer_type = GpuBuffer
    submissions_per_trim = 4096  # a trim frees memory, which waits for the device

    def __init__(self, driver: GpuDriver, ordinal: int, hal_device: Any, context: CudaContext | None) -> None:
        super().__init__(driver, hal_device)
        self._ordinal = ordinal
        self._context = context
        self._writes_host = driver == "cuda"
        self._staging = IreeStagingPool(self._allocator)
        self._lost: DeviceLostError | None = None
        self._launches = LaunchQueue(f"launches of {driver}://{ordinal}")

    def submit(
        self, context: Any, function: Any, is_async: bool, arguments: Sequence[DeviceBuffer]
    ) -> PollablePending:
        start = super().submit
        return self._launches.add(lambda: start(context, function, is_async, arguments))

    def allocate(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        stage: int = 0,
        only_dispatches: bool = False,
        on_host: bool = False,
    ) -> GpuBuffer:
        dtype = np.dtype(dtype)
        return self._guard(lambda: self._allocate(shape, dtype, on_host))

    def spare_bytes(self, stage: int = 0) -> int | None:
        if self._context is None:
            return spare_hip_bytes(self._ordinal)
        return self._guard(self._context.spare_bytes)

    def upload(self, array: Array) -> GpuBuffer:
        buffer = GpuBuffer(None, array.shape, array.dtype)
        buffer.staged = np.array(array, order="C")
        return buffer

    def download(self, buffer: DeviceBuffer) -> Array:
        source = cast(GpuBuffer, buffer)
        if source.staged is not None:
            return source.staged.copy()
        if source.on_host is not None:
            return source.on_host.content.copy().view(source.dtype).reshape(source.shape)
        return self._guard(lambda: self._fetch(source))

    def clear(self, buffer: DeviceBuffer, rows: Sequence[int]) -> None:
        target = cast(GpuBuffer, buffer)
        row_bytes = target.num_bytes // target.shape[0]

        def fill(commands: Any) -> None:
            for row in rows:
                commands.fill(target.hal, _ZERO, row * row_bytes, row_bytes)

        self._guard(lambda: self._execute(fill).wait())

    def close(self) -> None:
        if self._lost is None:
            self._launches.close()
            self._enter()
            super().close()

    def failed_in_flight(self, fence: Fence, error: Exception) -> InvocationError:
        return self._lose(error)

    def _read_parameters(self, paths: Sequence[Path]) -> Any:
        return stream_parameters(paths)

    def _compute_units(self) -> int | None:
        if self._context is None:
            return hip_compute_units(self._ordinal)
        return self._guard(self._context.compute_units)

    def _prepare(self, arguments: Sequence[DeviceBuffer]) -> None:
        if self._lost is not None:
            raise self._lost
        self._enter()
        buffers = {id(argument): cast(GpuBuffer, argument) for argument in arguments}
        if staged := [buffer for buffer in buffers.values() if buffer.staged is not None]:
            self._put_on_device(staged)

    def _allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any], on_host: bool) -> GpuBuffer:
        memory = None
        if on_host:
            memory = IreeStaging(self._allocator, prod(shape) * dtype.itemsize)
            memory.content[:] = 0
        if memory is not None and self._writes_host:
            view = iree.HalBufferView(memory.buffer, shape, ELEMENTS[dtype])
        else:
            view = self._new_view(shape, dtype)
            self._execute(lambda commands: commands.fill(view.get_buffer(), _ZERO)).wait()
        buffer = GpuBuffer(view, shape, dtype)
        buffer.on_host = memory
        return buffer

    def _bring(self, arguments: Sequence[DeviceBuffer]) -> Fence | None:
        if self._writes_host:
            return None
        buffers = cast(Sequence[GpuBuffer], arguments)
        brought = [(buffer, memory) for buffer in buffers if (memory := buffer.on_host) is not None]
        if not brought:
            return None

        def copy(commands: Any) -> None:
            for buffer, memory in brought:
                commands.copy(buffer.hal, memory.buffer, 0, 0, buffer.num_bytes)

        return self._execute(copy)

    def _put_on_device(self, buffers: Sequence[GpuBuffer]) -> None:
        ends = itertools.accumulate(-(-buffer.num_bytes // _ALIGNMENT) * _ALIGNMENT for buffer in buffers)
        offsets = [0, *ends]
        staging = self._staging.take(offsets[-1])
        views = [self._new_view(buffer.shape, buffer.dtype, is_small=True) for buffer in buffers]

        def copy(commands: Any) -> None:
            for buffer, view, offset in zip(buffers, views, offsets, strict=False):
                content = cast(Array, buffer.staged).reshape(-1).view(np.uint8)
                staging.content[offset : offset + len(content)] = content
                commands.copy(staging.buffer, view.get_buffer(), offset, 0, len(content))

        self._staging.give_back(staging, self._execute(copy))
        for buffer, view in zip(buffers, views, strict=True):
            buffer.view, buffer.staged = view, None

    def _fetch(self, source: GpuBuffer) -> Array:
        staging = self._staging.take(source.num_bytes)
        fence = self._timeline.submit(
            lambda wait, signal: self._hal_device.queue_copy(source.hal, staging.buffer, wait, signal)
        )
        fence.wait()
        content = staging.content[: source.num_bytes].copy().view(source.dtype).reshape(source.shape)
        self._staging.give_back(staging, fence)
        return content

    def _execute(self, record: Callable[[Any], None]) -> Fence:
        """Submit the commands that `record` adds to a command buffer; return the fence that they signal."""
        commands = iree.HalCommandBuffer(self._hal_device)
        record(commands)
        commands.end()
        return self._timeline.submit(
            lambda wait, signal: self._hal_device.queue_execute(commands, wait, signal)
        )

    def _new_view(self, shape: tuple[int, ...], dtype: np.dtype[Any], *, is_small: bool = False) -> Any:
        """Allocate an array; a small one with up to as many bytes unused, so that more allocations match."""
        num_bytes = prod(shape) * dtype.itemsize
        if is_small:
            num_bytes = max(_ALIGNMENT, 1 << (num_bytes - 1).bit_length())
        buffer = self._allocator.allocate_buffer(_MEMORY, _USAGE, num_bytes)
        return iree.HalBufferView(buffer, shape, ELEMENTS[dtype])

    def _guard(self, work: Callable[[], T]) -> T:
        """Run `work` after all launches and return its result. Raises InvocationError if the work fails."""
        if self._lost is None:
            self._launches.drain()
        with self._lock:
            if self._lost is not None:
                raise copy_of(self._lost)
            try:
                self._enter()
                return work()
            except Exception as error:
                raise self._refused(error) from None

    def _enter(self) -> None:
        if self._context is not None:
            self._context.enter()

    def _refused(self, error: Exception) -> InvocationError:
        if self._lost is not None:
            return copy_of(self._lost)
        if any(sign in str(error) for sign in _OF_THE_DRIVER):
            return self._lose(error)
        return super()._refused(error)

    def _lose(self, error: Exception) -> DeviceLostError:
        """Mark the device as lost, so that it is not used again; return the error to report."""
        if self._lost is None:
            self._lost = lost_error(error)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        return copy_of(self._lost)


class CudaContext:
    """The CUDA context that is current on the thread that creates this object.

    CUDA has a current context per thread. IREE 3.13 makes its context current only on the thread that opens a
    device. It must be current on every thread that allocates, because `cuda_allocator.c` does not set it.
    `library` is the CUDA driver's.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = library or ctypes.CDLL("libcuda.so.1")
        self._context = ctypes.c_void_p()
        self._check(self._library.cuCtxGetCurrent(ctypes.byref(self._context)))
        self._of_thread = threading.local()
        self._of_thread.entered = True

    def enter(self) -> None:
        """Make the context current on this thread, unless it already is. Raises RuntimeError."""
        if not getattr(self._of_thread, "entered", False):
            self._check(self._library.cuCtxSetCurrent(self._context))
            self._of_thread.entered = True

    def spare_bytes(self) -> int | None:
        """Return how many bytes may still be allocated. Callers must `enter` first, on the same thread."""
        return spare_gpu_bytes(self._library.cuMemGetInfo_v2)

    def compute_units(self) -> int | None:
        """Return the GPU's multiprocessors. Callers must `enter` first, on the same thread."""
        return cuda_compute_units(self._library)

    def _check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"CUDA driver error {status} from its context")
