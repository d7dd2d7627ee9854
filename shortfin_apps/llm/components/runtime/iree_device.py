"""The device on iree.runtime: the host CPU through the driver `local-task`.

Every submission waits for the fence of the previous one and signals the next point of one timeline. Arrays
are written and read through mappings: on the CPU that is a memory copy of about a microsecond, and unlike
the binding's own copy it does not release the GIL each time.

HAL objects need their device in order to be freed, but do not keep it alive, and the order is undefined in a
garbage cycle and at interpreter exit. So a process has one HAL device and never releases it.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import iree.runtime as iree
import numpy as np
from iree.runtime._binding import disable_leak_checker
from iree.runtime.array_interop import map_dtype_to_element_type

from shortfin_apps.llm.abi import PARAMETER_SCOPE
from shortfin_apps.llm.components.runtime.device import Array, DeviceBuffer, EntrySignature
from shortfin_apps.llm.components.runtime.dtypes import MLIR_DTYPES
from shortfin_apps.llm.components.runtime.huge_pages import empty_bytes, use_huge_pages
from shortfin_apps.llm.components.runtime.parameters import read_parameters
from shortfin_apps.llm.components.runtime.vmfb import Export, load_error, read_exports
from shortfin_apps.llm.errors import ArtifactError, InvocationError

# How long an idle worker polls for work before it sleeps. Waking a worker takes longer than a small
# dispatch runs.
_WORKER_SPIN_US = 100

# The allocator reuses freed buffers for requests of exactly their size and never releases them by itself.
# Entries of dynamic shape need other sizes for every batch, so it is trimmed regularly, at the cost of a few
# page faults.
_SUBMISSIONS_PER_TRIM = 256

_BYTE = np.dtype(np.uint8)
_MEMORY = iree.MemoryType.DEVICE_LOCAL | iree.MemoryType.HOST_VISIBLE
_USAGE = iree.BufferUsage.DEFAULT | iree.BufferUsage.MAPPING

_ELEMENTS = {dtype: map_dtype_to_element_type(dtype) for dtype in MLIR_DTYPES.values()}
_DTYPES = {int(element): dtype for dtype, element in _ELEMENTS.items()}
# A compiled module's integers are signless; they stand for the signed types.
_DTYPES |= {
    int(getattr(iree.HalElementType, f"INT_{bits}")): MLIR_DTYPES[f"i{bits}"] for bits in (8, 16, 32, 64)
}

# The first device opened decides for the process, as the driver reads its flags once.
_driver_lock = threading.Lock()
_threads = 0
_hal_device: Any = None


def open_local_task(threads: int | None = None) -> IreeDevice:
    """The host CPU with `threads` workers; by default one for each CPU this process may run on.

    Raises ArtifactError when this process already runs the driver with another number.
    """
    with _driver_lock:
        if _hal_device is None:
            _create_hal_device(threads or len(os.sched_getaffinity(0)))
    if threads not in (None, _threads):
        raise ArtifactError(
            f"this process already runs the CPU driver with {_threads} threads, not {threads}; "
            "the number cannot change until it restarts"
        )
    return IreeDevice(_hal_device)


def _create_hal_device(threads: int) -> None:
    global _hal_device, _threads
    iree.flags.parse_flags(
        # Without a count the driver starts one worker per physical core that it recognises.
        f"--task_topology_group_count={threads}",
        f"--task_worker_spin_us={_WORKER_SPIN_US}",
    )
    driver = iree.get_driver("local-task")
    _hal_device = driver.create_device_by_uri("local-task", allocators=["caching"])
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_hal_device))
    disable_leak_checker()  # it would report the reference above at exit
    _threads = threads


class IreeBuffer:
    """An array on the device."""

    __slots__ = ("dtype", "shape", "view")

    def __init__(self, view: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.view = view
        self.shape = shape
        self.dtype = dtype

    @classmethod
    def from_view(cls, view: Any) -> IreeBuffer:
        return cls(view, tuple(view.shape), _DTYPES[int(view.element_type)])

    def map_bytes(self) -> Array:
        """The contents, writable, as `uint8[bytes]`; valid while this buffer lives."""
        size = prod(self.shape) * self.dtype.itemsize
        return cast(Array, self.view.map().asarray((size,), _BYTE))


class IreePending:
    """An invocation in flight; holds its arguments until the device is done with them."""

    def __init__(
        self, timeline: _Timeline, fence: _Fence, arguments: Sequence[DeviceBuffer], results: Any
    ) -> None:
        self._timeline = timeline
        self._fence = fence
        self._arguments = arguments
        self._results = results

    @property
    def done(self) -> bool:
        return self._fence.done

    def wait(self) -> Sequence[DeviceBuffer]:
        try:
            self._fence.wait()
        except Exception as error:
            self._timeline.abandon(self._fence)
            raise InvocationError(f"the device failed under this invocation ({error})") from None
        self._arguments = ()
        views = (self._results.get_as_object(i, iree.HalBufferView) for i in range(len(self._results)))
        return [IreeBuffer.from_view(view) for view in views]


class FailedPending:
    """An invocation that failed while it was being started."""

    done = True

    def __init__(self, error: InvocationError) -> None:
        self._error = error

    def wait(self) -> Sequence[DeviceBuffer]:
        raise self._error


class _Fence:
    """One point of a timeline."""

    __slots__ = ("_fence", "_semaphore", "_value")

    def __init__(self, semaphore: Any, value: int) -> None:
        self._fence = iree.HalFence.create_at(semaphore, value)
        self._semaphore = semaphore
        self._value = value

    @property
    def hal(self) -> Any:
        return self._fence

    @property
    def failed(self) -> bool:
        try:
            self._semaphore.query()
        except Exception:
            return True
        return False

    @property
    def done(self) -> bool:
        """Reached or failed."""
        return self.failed or bool(self._semaphore.query() >= self._value)

    def wait(self) -> None:
        """Raises RuntimeError if the timeline failed before this point."""
        self._fence.wait()

    def next(self) -> _Fence:
        return _Fence(self._semaphore, self._value + 1)

    def same_timeline(self, other: _Fence) -> bool:
        return self._semaphore is other._semaphore


class _Timeline:
    """The order of a device's submissions.

    A semaphore that failed, or whose next value may never be signalled, cannot be used any more; the timeline
    then continues on a new one. (If the driver's own queue breaks, every later invocation fails too, and only
    a restart helps.)
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._restart()
        self.last = self._origin  # what the next submission waits for
        self._signal = self._origin

    def propose(self) -> _Fence:
        """The point that the next submission signals."""
        return self._signal.next()

    def accept(self, fence: _Fence) -> None:
        self.last = self._signal = fence

    def reject(self) -> None:
        """Discards the proposed point, which was passed to a submission that failed.

        Later points come from a new semaphore; their submissions wait for `last` unless that failed too.
        """
        self._restart()
        self._signal = self._origin
        if self.last.failed:
            self.last = self._origin

    def abandon(self, fence: _Fence) -> None:
        """Starts over after `fence` failed, and with it all later points of its semaphore."""
        if fence.same_timeline(self.last):
            self._restart()
            self.last = self._signal = self._origin

    def _restart(self) -> None:
        self._origin = _Fence(self._device.create_semaphore(0), 0)


class IreeProgram:
    def __init__(self, device: IreeDevice, context: Any, module: Any, exports: Mapping[str, Export]) -> None:
        self._device = device
        self._context = context
        self._exports = exports
        self._functions = {name: module.lookup_function(e.function) for name, e in exports.items()}
        self._entries = MappingProxyType({name: e.signature for name, e in exports.items()})

    @property
    def entries(self) -> Mapping[str, EntrySignature]:
        return self._entries

    def submit(self, entry: str, arguments: Sequence[DeviceBuffer]) -> IreePending | FailedPending:
        function, is_async = self._functions[entry], self._exports[entry].is_async
        return self._device.submit(self._context, function, is_async, arguments)


class IreeDevice:
    def __init__(self, device: Any) -> None:
        self._device = device
        self._allocator = device.allocator
        self._instance = iree.VmInstance()
        self._timeline = _Timeline(device)
        self._in_flight: deque[IreePending] = deque()
        self._num_submissions = 0
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return "local-task"

    def load_program(self, vmfb: Path, parameters: Sequence[Path], module_name: str) -> IreeProgram:
        exports = read_exports(vmfb, module_name)
        provider = read_parameters(parameters).create_provider(scope=PARAMETER_SCOPE)
        try:
            module = iree.VmModule.mmap(self._instance, str(vmfb))
            modules = [
                iree.create_io_parameters_module(self._instance, provider),
                iree.create_hal_module(self._instance, self._device),
                module,
            ]
            context = iree.VmContext(self._instance, modules=modules)
        except Exception as error:
            raise load_error(vmfb, error) from None
        return IreeProgram(self, context, module, exports)

    def allocate(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        stage: int = 0,
        only_dispatches: bool = False,
    ) -> IreeBuffer:
        dtype = np.dtype(dtype)
        if only_dispatches:
            return self._allocate_on_page(shape, dtype)
        buffer, array = self._new_buffer(shape, dtype)
        use_huge_pages(array.map_bytes())
        buffer.fill_zero(0, prod(shape) * dtype.itemsize)
        return array

    def _allocate_on_page(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> IreeBuffer:
        """Imports memory aligned to a page, so that blocks of 4 KiB in a KV page do not straddle two pages.

        The allocator's own buffers start behind a header. Imported memory cannot be discarded, which fills
        and copies need, so only dispatches may write it.
        """
        memory = empty_bytes(prod(shape) * dtype.itemsize)
        buffer = self._device.from_dlpack_capsule(memory.__dlpack__()).get_buffer()
        memory.fill(0)
        return IreeBuffer(iree.HalBufferView(buffer, shape, _ELEMENTS[dtype]), shape, dtype)

    def upload(self, array: Array) -> IreeBuffer:
        _, copy = self._new_buffer(array.shape, array.dtype)
        copy.map_bytes()[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return copy

    def download(self, buffer: DeviceBuffer) -> Array:
        source = cast(IreeBuffer, buffer)
        return source.map_bytes().copy().view(source.dtype).reshape(source.shape)

    def clear(self, buffer: DeviceBuffer, rows: Sequence[int]) -> None:
        target = cast(IreeBuffer, buffer)
        target.map_bytes().reshape(target.shape[0], -1)[list(rows)] = 0

    def close(self) -> None:
        for pending in self._in_flight:
            try:
                pending.wait()
            except InvocationError:
                continue  # reported to whoever waits for it
        self._in_flight.clear()
        self._allocator.trim()

    def submit(
        self, context: Any, function: Any, is_async: bool, arguments: Sequence[DeviceBuffer]
    ) -> IreePending | FailedPending:
        values = iree.VmVariantList(len(arguments) + 2)
        results = iree.VmVariantList(4)
        for argument in arguments:
            values.push_ref(cast(IreeBuffer, argument).view)
        with self._lock:
            self._forget_finished()
            self._num_submissions += 1
            if self._num_submissions % _SUBMISSIONS_PER_TRIM == 0:
                self._allocator.trim()
            start = self._start_async if is_async else self._start_sync
            try:
                fence = start(context, function, values, results)
            except Exception as error:
                return FailedPending(InvocationError(f"the entry refused this invocation ({error})"))
            pending = IreePending(self._timeline, fence, arguments, results)
            self._in_flight.append(pending)
            return pending

    def _start_async(self, context: Any, function: Any, values: Any, results: Any) -> _Fence:
        fence = self._timeline.propose()
        values.push_ref(self._timeline.last.hal)
        values.push_ref(fence.hal)
        try:
            context.invoke(function, values, results)
        except Exception:
            self._timeline.reject()
            raise
        self._timeline.accept(fence)
        return fence

    def _start_sync(self, context: Any, function: Any, values: Any, results: Any) -> _Fence:
        """Runs an entry without fences at once, after waiting for all earlier submissions."""
        fence = self._timeline.last
        try:
            fence.wait()
        except Exception:
            self._timeline.abandon(fence)
            fence = self._timeline.last
        context.invoke(function, values, results)
        return fence

    def _forget_finished(self) -> None:
        while self._in_flight and self._in_flight[0].done:
            self._in_flight.popleft()

    def _new_buffer(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Any, IreeBuffer]:
        buffer = self._allocator.allocate_buffer(_MEMORY, _USAGE, prod(shape) * dtype.itemsize)
        view = iree.HalBufferView(buffer, shape, _ELEMENTS[dtype])
        return buffer, IreeBuffer(view, shape, dtype)
