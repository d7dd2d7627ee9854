"""Devices on shortfin: AMD GPUs and the host CPU.

All calls to shortfin are made on one dedicated worker thread, in one long-lived `sf.Process` (a coroutine)
that reads calls from a queue; callers get a `concurrent.futures.Future`. The reasons for this design:

- If a device is awaited outside of a worker's process, completions are noticed only every 500 ms.
- Allocating on the CPU waits for earlier work while holding the GIL, and forever if that work has not been
  flushed. Therefore arrays are put on the device inside `submit`, after the last invocation was flushed; on
  the CPU, after the last invocation has completed.
- An invocation that fails on the host leaves its point of the fiber's timeline unsignalled, so nothing on
  that fiber completes any more: the next invocation runs on a new fiber. An array remembers at most eight
  other fibers, so a page table survives eight such failures; then the server must be restarted.
- A failure on a GPU is final. IREE 3.9's HIP driver then fails all later work; or it frees its error twice,
  which ends the process (possibly within the failed invocation); or it waits forever for a buffer of an
  invocation queued after the failed one, until the engine's stall timeout. Therefore the device is not used
  again, not even to free its memory.
- Freeing an array records on the timeline of the array's fiber, which only the worker may access, so buffers
  pass their arrays to the worker to be freed. If the timeline has failed, shortfin ends the process.
  Therefore arrays are freed only while no work that may still fail is in flight, and arrays that existed when
  something failed are never freed. If about 70 arrays are freed at once on the CPU, the timeline fails.

GPU memory: IREE 3.9's HIP driver never uses HIP's memory pools. Until the device is closed, the driver keeps
a freed device buffer for requests of exactly the same size. Shapes of earlier invocations therefore cost no
`hipMalloc`, but memory grows with the number of different shapes. The driver does not keep page-locked host
memory; StagingPool does.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast
from weakref import WeakSet

import numpy as np
import shortfin as sf
import shortfin.array as sfnp

from shortfin_apps.llm.components.runtime.declaration import MLIR_DTYPES
from shortfin_apps.llm.components.runtime.device import Array, DeviceBuffer, EntrySignature
from shortfin_apps.llm.components.runtime.device_errors import (
    cause_of,
    copy_of,
    invocation_error,
    is_of_hip,
    lost_error,
)
from shortfin_apps.llm.components.runtime.gpu_choice import select, unavailable, unopenable
from shortfin_apps.llm.components.runtime.gpu_memory import spare_hip_bytes
from shortfin_apps.llm.components.runtime.memory import spare_host_bytes
from shortfin_apps.llm.components.runtime.parameters import open_parameters
from shortfin_apps.llm.components.runtime.residency import check_residency, hip_compute_units
from shortfin_apps.llm.components.runtime.shortfin_buffer import (
    ShortfinBuffer,
    Staging,
    StagingPool,
    read,
    write,
)
from shortfin_apps.llm.components.runtime.shortfin_process import Call, Completion, Process
from shortfin_apps.llm.components.runtime.vmfb import Export, load_error, read_exports
from shortfin_apps.llm.contract.abi import PARAMETER_SCOPE
from shortfin_apps.llm.contract.errors import ArtifactError, DeviceLostError, InvocationError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ELEMENTS = {dtype: getattr(sfnp, dtype.name) for dtype in MLIR_DTYPES.values()}  # named as in numpy
_DTYPES = {str(element): dtype for dtype, element in _ELEMENTS.items()}
_ZERO = np.zeros(1, np.uint8)

# With more disposed arrays than this, an invocation starts only once all in flight have completed.
_MAX_DISPOSED = 256
_MOST_FREED = 32  # arrays at once


def open_hostcpu() -> ShortfinDevice:
    """Open the host CPU, with one worker per physical core of this process's NUMA node.

    shortfin has no setting for hardware threads or for spinning workers.
    """
    builder = sf.host.CPUSystemBuilder(env_prefix=None, hostcpu_allocators="caching")
    return ShortfinDevice("hostcpu", builder.create_system())


class ShortfinPending:
    """An invocation in flight."""

    def __init__(self, future: Future[Sequence[ShortfinBuffer]]) -> None:
        self._future = future

    def results(self) -> Sequence[DeviceBuffer]:
        return self.wait()

    def wait(self) -> Sequence[DeviceBuffer]:
        return self._future.result()


class ShortfinProgram:
    def __init__(
        self, device: ShortfinDevice, functions: dict[str, Any], exports: Mapping[str, Export]
    ) -> None:
        self._device = device
        self._functions = functions
        self._entries = MappingProxyType({name: e.signature for name, e in exports.items()})
        self._async_entries = {name for name, e in exports.items() if e.is_async}

    @property
    def entries(self) -> Mapping[str, EntrySignature]:
        return self._entries

    def submit(self, entry: str, arguments: Sequence[DeviceBuffer]) -> ShortfinPending:
        buffers = [cast(ShortfinBuffer, argument) for argument in arguments]
        is_async = entry in self._async_entries
        return ShortfinPending(self._device.invoke(self._functions[entry], buffers, is_async=is_async))

    def release(self) -> None:
        """Free the functions. Callers must be on the worker, and the system not shut down yet."""
        self._functions.clear()


class ShortfinDevice:
    """A device: AMD GPUs with these `ordinals` in HIP, one per pipeline stage; without any, the host CPU."""

    def __init__(self, name: str, system: Any, ordinals: Sequence[int] = ()) -> None:
        self._name = name
        self._ordinals = ordinals
        self._system = system
        self._unified = not ordinals  # the host can access the device's memory
        self._worker = system.create_worker("device")
        self._fiber = system.create_fiber(self._worker)
        self._staging = StagingPool(self._fiber)
        self._queue = system.create_queue()
        self._process = Process(self._queue.reader(), fiber=self._fiber)
        self._process.launch()
        self._arrays: dict[int, Any] = {}  # arrays on the device, by `id()`, until they are freed
        self._leaked: list[Any] = []  # objects that are never freed
        self._disposed: list[Any] = []  # arrays to free
        self._in_flight: set[asyncio.Task[None]] = set()  # one per invocation; used by the worker only
        self._buffers: WeakSet[ShortfinBuffer] = WeakSet()
        self._programs: list[ShortfinProgram] = []
        self._lost: DeviceLostError | None = None  # after a failure on a GPU
        self._closed = False
        atexit.register(self.close)  # an open system keeps the process from exiting

    @property
    def name(self) -> str:
        return self._name

    def load_program(self, vmfb: Path, parameters: Sequence[Path], module_name: str) -> ShortfinProgram:
        exports = read_exports(vmfb, module_name)
        check_residency(vmfb, (export.signature for export in exports.values()), self._compute_units)
        open_parameters(parameters)  # checks the files
        try:
            provider = sf.StaticProgramParameters(self._system, parameter_scope=PARAMETER_SCOPE)
            for path in parameters:
                provider.load(str(path), mmap=True)
            modules = [
                sf.ProgramModule.parameter_provider(self._system, provider),
                sf.ProgramModule.load(self._system, str(vmfb), mmap=True),
            ]
            # One context for all fibers, because only `_process` starts invocations.
            loaded = sf.Program(modules, devices=self._fiber.raw_devices, isolation=sf.ProgramIsolation.NONE)
            functions = {name: loaded[f"{module_name}.{name}"] for name in exports}
        except Exception as error:
            raise load_error(vmfb, error) from None
        program = ShortfinProgram(self, functions, exports)
        self._programs.append(program)
        return program

    def allocate(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        stage: int = 0,
        only_dispatches: bool = False,
        on_host: bool = False,
    ) -> ShortfinBuffer:
        return self._call(lambda: self._allocate(shape, np.dtype(dtype), stage, on_host)).result()

    def spare_bytes(self, stage: int = 0) -> int | None:
        return spare_hip_bytes(self._ordinals[stage]) if self._ordinals else spare_host_bytes()

    def upload(self, array: Array) -> ShortfinBuffer:
        return self._buffer(array.shape, array.dtype, np.array(array, order="C"))

    def download(self, buffer: DeviceBuffer) -> Array:
        source = cast(ShortfinBuffer, buffer)
        if source.staged is not None:
            return source.staged.copy()
        if self._unified:
            return read(source.array.storage, source.shape, source.dtype)
        if source.copy is not None:
            return read(source.copy.storage, source.shape, source.dtype)
        return self._call(lambda: self._fetch(source)).result()

    def clear(self, buffer: DeviceBuffer, rows: Sequence[int]) -> None:
        array = cast(ShortfinBuffer, buffer).array
        if not self._unified:
            self._call(lambda: self._fill(array, rows)).result()
            return
        with array.storage.map(read=True, write=True) as mapping:
            content = np.frombuffer(mapping, np.uint8).reshape(buffer.shape[0], -1)
            content[list(rows)] = 0

    def invoke(
        self, function: Any, buffers: Sequence[ShortfinBuffer], *, is_async: bool
    ) -> Future[Sequence[ShortfinBuffer]]:
        """Queue a call of `function`; if the invocation fails, the future raises InvocationError."""
        future: Future[Sequence[ShortfinBuffer]] = Future()
        self._queue.write_nodelay(Call(lambda: self._invoke(function, buffers, is_async, future)))
        return future

    def dispose(self, array: Any) -> None:
        """Queue an array to be freed by the worker; callable from any thread."""
        if not self._closed:
            self._disposed.append(array)

    def close(self) -> None:
        if self._closed:
            return
        atexit.unregister(self.close)
        self._call(self._release).result()
        self._closed = True
        self._queue.close()
        self._process.ended.result()
        if self._lost is None:
            del self._process, self._queue, self._staging, self._fiber, self._worker
        self._system.shutdown()

    def _buffer(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], content: Any, **place: Any
    ) -> ShortfinBuffer:
        buffer = ShortfinBuffer(self.dispose, shape, dtype, content, **place)
        self._buffers.add(buffer)
        return buffer

    def _call(self, work: Callable[[], Awaitable[T]]) -> Future[T]:
        """Queue `work` to run on the worker; if the work fails, the future raises InvocationError."""
        future: Future[T] = Future()

        async def start() -> None:
            try:
                future.set_result(await work())
            except Exception as error:
                await self._drain()
                future.set_exception(self._recover(self._fiber, error))

        self._queue.write_nodelay(Call(start))
        return future

    # The methods below run on the worker.

    async def _invoke(
        self,
        function: Any,
        buffers: Sequence[ShortfinBuffer],
        is_async: bool,
        future: Future[Sequence[ShortfinBuffer]],
    ) -> None:
        fiber = self._fiber
        try:
            self._check()
            await self._free_disposed()
            each = dict.fromkeys(buffers)  # two arguments may be one buffer
            stagings = await self._put_on_device([b for b in each if b.staged is not None])
            if not is_async:  # a synchronous function does not wait for earlier work
                await Completion(fiber.device(0))
            results = await function(*(b.argument for b in buffers), fiber=fiber)
            for buffer in buffers:
                if buffer.copy is not None:
                    buffer.copy.storage.copy_from(buffer.array.storage)
            completion = Completion(fiber.device(0))
        except Exception as error:
            await self._drain()  # the next invocation, on another fiber, could overtake the ones in flight
            future.set_exception(self._recover(fiber, error))
            return
        task = self._worker.loop.create_task(
            self._complete(completion, fiber, results, buffers, stagings, future)
        )
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)

    async def _complete(
        self,
        completion: Completion,
        fiber: Any,
        results: Any,
        buffers: Sequence[ShortfinBuffer],  # kept alive until here
        stagings: Sequence[Staging],
        future: Future[Sequence[ShortfinBuffer]],
    ) -> None:
        try:
            await completion
            if fiber is self._fiber:
                for staging in stagings:
                    self._staging.give_back(staging)
            future.set_result([self._result(array) for array in results])
        except Exception as error:
            self._leak(results)  # freeing a result would wait for its allocation
            future.set_exception(self._recover(fiber, error))

    def _result(self, array: Any) -> ShortfinBuffer:
        self._arrays[id(array)] = array
        return self._buffer(tuple(array.shape), _DTYPES[str(array.dtype)], array)

    async def _put_on_device(self, staged: Sequence[ShortfinBuffer]) -> Sequence[Staging]:
        """Move the buffers to the device; return the host memory that the copies read from."""
        if staged and self._unified:
            await Completion(self._fiber.device(0))  # else allocating would wait while holding the GIL
        contents = []
        for buffer in staged:  # all allocations first, so that the copies make one submission
            contents.append(cast(Array, buffer.staged))
            buffer.array, buffer.staged = self._new_array(buffer.shape, buffer.dtype, buffer.stage), None
        if self._unified:
            for buffer, content in zip(staged, contents, strict=True):
                write(buffer.array.storage, content)
            return ()
        stagings = [self._staging.take(buffer.num_bytes, buffer.stage) for buffer in staged]
        for buffer, content, staging in zip(staged, contents, stagings, strict=True):
            write(staging.storage, content)
            buffer.array.storage.copy_from(staging.storage)
        return stagings

    def _compute_units(self) -> int | None:
        """Return the compute units of the smallest GPU; None if one does not report them."""
        return min((hip_compute_units(each) or 0 for each in self._ordinals), default=0) or None

    async def _allocate(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], stage: int, on_host: bool
    ) -> ShortfinBuffer:
        self._check()
        if self._unified:
            await Completion(self._fiber.device(0))
        stage %= len(self._fiber.raw_devices)
        array = self._new_array(shape, dtype, stage)
        array.fill(_ZERO)
        if not on_host or self._unified:
            await Completion(array.device)
            return self._buffer(shape, dtype, array, stage=stage, is_page_table=True)
        copy = self._new_array(shape, dtype, stage, on_host=True)
        copy.storage.copy_from(array.storage)
        await Completion(array.device)
        return self._buffer(shape, dtype, array, stage=stage, copy=copy)

    async def _fetch(self, source: ShortfinBuffer) -> Array:
        self._check()
        staging = self._staging.take(source.num_bytes, source.stage)
        staging.storage.copy_from(source.array.storage)
        await Completion(self._fiber.device(source.stage))
        content = read(staging.storage, source.shape, source.dtype)
        self._staging.give_back(staging)
        return content

    async def _fill(self, array: Any, rows: Sequence[int]) -> None:
        self._check()
        if self._leaked:
            # Work on an array may wait for the fiber that created the array, which may not complete any more.
            logger.warning("pages of a request that failed are not cleared, as the device has failed before")
            return
        for row in rows:
            array.view(row).fill(_ZERO)
        await Completion(array.device)

    async def _free_disposed(self) -> None:
        if self._in_flight and len(self._disposed) > _MAX_DISPOSED:
            await self._drain()
        while self._disposed and not self._in_flight:
            freed, self._disposed[:_MOST_FREED] = self._disposed[:_MOST_FREED], []
            for array in freed:
                self._arrays.pop(id(array), None)
            del array, freed
            if self._disposed:  # wait between groups only, as every invocation comes here
                for stage in range(len(self._fiber.raw_devices)):
                    await Completion(self._fiber.device(stage))

    async def _drain(self) -> None:
        for task in list(self._in_flight):
            await task

    async def _release(self) -> None:
        # The timeline may complete before the tasks in flight, which cannot run after the queue is closed.
        await self._drain()
        try:
            for stage in range(len(self._fiber.raw_devices)):
                self._check()
                await Completion(self._fiber.device(stage))
        except Exception as error:
            logger.warning("while it was closed: %s", self._recover(self._fiber, error))
        if self._lost is not None:
            return
        for buffer in list(self._buffers):
            buffer.array = buffer.staged = buffer.copy = None
        self._disposed.clear()
        self._arrays.clear()
        for program in self._programs:
            program.release()
        self._programs.clear()  # breaks a reference cycle, so that memory is freed at once

    def _new_array(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], stage: int, *, on_host: bool = False
    ) -> Any:
        make = sfnp.device_array.for_host if on_host else sfnp.device_array.for_device
        array = make(self._fiber.device(stage), list(shape), _ELEMENTS[dtype])
        self._arrays[id(array)] = array
        return array

    def _check(self) -> None:
        """Raise DeviceLostError if the device must not be used any more."""
        if self._lost is not None:
            raise self._lost

    def _recover(self, fiber: Any, error: Exception) -> InvocationError:
        """Switch to a new fiber after `error` on `fiber`, if possible; return the error to report."""
        if self._lost is not None:
            return copy_of(self._lost)
        if fiber is self._fiber:
            self._leak((self._arrays, self._staging))
            self._arrays = {}
            if not self._unified and is_of_hip(error):
                self._lost = lost_error(cause_of(fiber, error))
                return copy_of(self._lost)
            self._fiber = self._system.create_fiber(self._worker)
            self._staging = StagingPool(self._fiber)
        return invocation_error(error)

    def _leak(self, thing: Any) -> None:
        """Keep `thing`, and the system, alive beyond interpreter exit.

        The destructor of a system waits for all arrays, but arrays of a failed timeline are never freed.
        """
        if not self._leaked:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        self._leaked.append(thing)


def open_hip(device_ids: Sequence[str] = ()) -> ShortfinDevice:
    """Open AMD GPUs by index or by the driver's name, one per pipeline stage; by default the first.

    Raises ArtifactError.
    """
    if not sf.amdgpu.is_available():
        raise ArtifactError("this shortfin was built without AMD GPU support; install shortfin 3.9 from PyPI")
    # With `env_prefix=None`, shortfin's environment variables have no effect. For asynchronous allocations,
    # the driver would create memory pools that it never uses.
    builder = sf.amdgpu.SystemBuilder(
        env_prefix=None, amdgpu_async_allocations=False, amdgpu_async_caching=True
    )
    available = _available(builder)
    builder.visible_devices = chosen = select("hip", device_ids or ("0",), available)
    try:
        system = builder.create_system()
    except Exception as error:
        raise unopenable("hip", error) from None
    ordinals = [available.index(name) for name in chosen]
    return ShortfinDevice("hip", system, ordinals)


def _available(builder: Any) -> list[str]:
    """Return the driver's names of all GPUs. Raises ArtifactError if that fails."""
    try:
        return list(builder.available_devices)
    except Exception as error:
        raise unavailable("hip", error) from None
