"""Common parts of iree.runtime devices: programs, and invocations ordered on one timeline.

The subclasses are in iree_local.py (the host CPU) and iree_gpu.py. Freeing a HAL object requires its HAL
device, but the object does not keep the device alive, and the order of frees is undefined in a garbage cycle
and at interpreter exit. Therefore a HAL device is created once per process and never released
(`never_release`).
"""

from __future__ import annotations

import ctypes
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, cast

import iree.runtime as iree
import numpy as np
from iree.runtime._binding import disable_leak_checker
from iree.runtime.array_interop import map_dtype_to_element_type

from shortfin_apps.llm.components.runtime.declaration import MLIR_DTYPES
from shortfin_apps.llm.components.runtime.device import (
    DeviceBuffer,
    EntrySignature,
    Pending,
    PollablePending,
)
from shortfin_apps.llm.components.runtime.iree_timeline import Fence, Timeline
from shortfin_apps.llm.components.runtime.residency import check_residency
from shortfin_apps.llm.components.runtime.vmfb import Export, load_error, mapped_module, read_exports
from shortfin_apps.llm.contract.abi import PARAMETER_SCOPE
from shortfin_apps.llm.contract.errors import InvocationError

ELEMENTS = {dtype: map_dtype_to_element_type(dtype) for dtype in MLIR_DTYPES.values()}
_DTYPES = {int(element): dtype for dtype, element in ELEMENTS.items()}
# A compiled module's integer types are signless; these are mapped to signed types.
_DTYPES |= {
    int(getattr(iree.HalElementType, f"INT_{bits}")): MLIR_DTYPES[f"i{bits}"] for bits in (8, 16, 32, 64)
}


def never_release(hal_device: Any) -> None:
    """Keep a HAL device alive beyond interpreter exit."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(hal_device))
    disable_leak_checker()  # the leak checker would report the added reference at exit


class IreeBuffer:
    """An array on the device."""

    __slots__ = ("dtype", "shape", "view")

    def __init__(self, view: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.view = view
        self.shape = shape
        self.dtype = dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class IreePending:
    """An invocation in flight; keeps its arguments alive until the invocation has completed."""

    def __init__(
        self, device: IreeDevice, fence: Fence, arguments: Sequence[DeviceBuffer], results: Any
    ) -> None:
        self._device = device
        self._fence = fence
        self._arguments = arguments
        self._results = results

    @property
    def done(self) -> bool:
        return self._fence.done

    def results(self) -> Sequence[DeviceBuffer]:
        views = (self._results.get_as_object(i, iree.HalBufferView) for i in range(len(self._results)))
        return [self._device.result(view, self._fence) for view in views]

    def wait(self) -> Sequence[DeviceBuffer]:
        try:
            self._fence.wait()
        except Exception as error:
            raise self._device.failed_in_flight(self._fence, error) from None
        self._arguments = ()
        return self.results()


class FailedPending:
    """An invocation that failed to start."""

    done = True

    def __init__(self, error: InvocationError) -> None:
        self._error = error

    def results(self) -> Sequence[DeviceBuffer]:
        raise self._error

    def wait(self) -> Sequence[DeviceBuffer]:
        raise self._error


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

    def submit(self, entry: str, arguments: Sequence[DeviceBuffer]) -> Pending:
        function, is_async = self._functions[entry], self._exports[entry].is_async
        return self._device.submit(self._context, function, is_async, arguments)


class IreeDevice(ABC):
    """A `Device` on one HAL device; subclasses implement the methods for buffers."""

    buffer_type: ClassVar[type[IreeBuffer]] = IreeBuffer
    # The allocator reuses freed buffers only for requests of exactly the same size, and releases no memory by
    # itself. Entries of dynamic shape need different sizes for every batch, so the allocator is trimmed
    # regularly.
    submissions_per_trim: ClassVar[int]

    def __init__(self, name: str, hal_device: Any) -> None:
        self._name = name
        self._hal_device = hal_device
        self._allocator = hal_device.allocator
        self._instance = iree.VmInstance()
        self._timeline = Timeline(hal_device)
        self._in_flight: deque[IreePending] = deque()
        self._num_submissions = 0
        self._lock = threading.RLock()

    @property
    def name(self) -> str:
        return self._name

    def load_program(self, vmfb: Path, parameters: Sequence[Path], module_name: str) -> IreeProgram:
        exports = read_exports(vmfb, module_name)
        check_residency(vmfb, (export.signature for export in exports.values()), self._compute_units)
        provider = self._read_parameters(parameters).create_provider(scope=PARAMETER_SCOPE)
        try:
            module = mapped_module(self._instance, vmfb)
            modules = [
                iree.create_io_parameters_module(self._instance, provider),
                iree.create_hal_module(self._instance, self._hal_device),
                module,
            ]
            context = iree.VmContext(self._instance, modules=modules)
        except Exception as error:
            raise load_error(vmfb, error) from None
        return IreeProgram(self, context, module, exports)

    def close(self) -> None:
        for pending in self._in_flight:
            try:
                pending.wait()
            except InvocationError:
                continue  # `wait` of that invocation reports this error
        self._in_flight.clear()
        self._allocator.trim()

    def submit(
        self, context: Any, function: Any, is_async: bool, arguments: Sequence[DeviceBuffer]
    ) -> PollablePending:
        results = iree.VmVariantList(4)
        with self._lock:
            try:
                self._forget_finished()
                self._prepare(arguments)
                fence = self._start(context, function, is_async, arguments, results)
                fence = self._bring(arguments) or fence
            except Exception as error:
                return FailedPending(self._refused(error))
            pending = IreePending(self, fence, arguments, results)
            self._in_flight.append(pending)
            return pending

    def result(self, view: Any, written: Fence) -> IreeBuffer:
        """Wrap a result, a HAL buffer view, in a buffer; its contents are valid after `written`."""
        return self.buffer_type(view, tuple(view.shape), _DTYPES[int(view.element_type)])

    def failed_in_flight(self, fence: Fence, error: Exception) -> InvocationError:
        """Return the error for an invocation that the device did not complete."""
        self._timeline.abandon(fence)
        return InvocationError(f"the device failed under this invocation ({error})")

    @abstractmethod
    def _read_parameters(self, paths: Sequence[Path]) -> Any:
        """Return an iree.runtime.ParameterIndex of the files. Raises ArtifactError."""

    def _compute_units(self) -> int | None:
        return None

    def _prepare(self, arguments: Sequence[DeviceBuffer]) -> None:  # noqa: B027
        """Hook called under the lock before an invocation with these arguments is started."""

    def _bring(self, arguments: Sequence[DeviceBuffer]) -> Fence | None:
        """Copy `on_host` arguments to the host after an invocation.

        Returns the fence that the copies signal; None if there are none.
        """
        return None

    def _refused(self, error: Exception) -> InvocationError:
        """Return the error for an invocation that could not be started."""
        return InvocationError(f"the entry refused this invocation ({error})")

    def _start(
        self, context: Any, function: Any, is_async: bool, arguments: Sequence[DeviceBuffer], results: Any
    ) -> Fence:
        values = iree.VmVariantList(len(arguments) + 2)
        for argument in arguments:
            values.push_ref(cast(IreeBuffer, argument).view)
        if not is_async:
            return self._run_sync(context, function, values, results)

        def invoke(wait: Any, signal: Any) -> None:
            values.push_ref(wait)
            values.push_ref(signal)
            context.invoke(function, values, results)

        return self._timeline.submit(invoke)

    def _run_sync(self, context: Any, function: Any, values: Any, results: Any) -> Fence:
        """Wait for all earlier submissions, then run an entry without fences synchronously."""
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
        self._num_submissions += 1
        if self._num_submissions % self.submissions_per_trim == 0:
            self._allocator.trim()
