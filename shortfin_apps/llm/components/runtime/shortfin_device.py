"""The device on shortfin: AMD GPUs, and the host CPU.

All calls to shortfin are made on one worker thread of its own, in one long-lived shortfin process that reads
calls from a queue; callers get a `concurrent.futures.Future`. The reasons for this design:

- A device awaited outside of a worker's process completes only every 500 ms.
- Allocating on the CPU waits for earlier work while holding the GIL, and forever if that work has not been
  flushed. So arrays are put on the device inside `submit`, after the last invocation was flushed, and on the
  CPU after it has completed.
- A failed invocation leaves its point of the fiber's timeline unsignalled, so nothing on that fiber completes
  any more: the next invocation runs on a new fiber. An array remembers at most eight other fibers, so a page
  table survives eight such failures; then the server must be restarted.
- Freeing an array records on its fiber's timeline, which only the worker may touch, so buffers hand their
  arrays over to the worker to be freed.

The CPU part is tested. The GPU part differs in how the system is built and in copies through host memory; it
follows shortfin's interface and upstream's use of it, and has never been run.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import logging
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast
from weakref import WeakSet

import numpy as np
import shortfin as sf
import shortfin.array as sfnp

from shortfin_apps.llm.abi import PARAMETER_SCOPE
from shortfin_apps.llm.components.runtime.device import Array, DeviceBuffer, EntrySignature
from shortfin_apps.llm.components.runtime.dtypes import MLIR_DTYPES
from shortfin_apps.llm.components.runtime.parameters import open_parameters
from shortfin_apps.llm.components.runtime.vmfb import Export, load_error, read_exports
from shortfin_apps.llm.errors import ArtifactError, InvocationError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ELEMENTS = {dtype: getattr(sfnp, dtype.name) for dtype in MLIR_DTYPES.values()}  # named as in numpy
_DTYPES = {str(element): dtype for dtype, element in _ELEMENTS.items()}
_ZERO = np.zeros(1, np.uint8)


def open_hostcpu() -> ShortfinDevice:
    """The host CPU, with one worker per physical core of this process's NUMA node.

    shortfin has no setting for hardware threads, nor for spinning workers.
    """
    builder = sf.host.CPUSystemBuilder(env_prefix=None, hostcpu_allocators="caching")
    return ShortfinDevice(builder.create_system(), unified=True)


def open_amdgpu(device_ids: Sequence[str] = ()) -> ShortfinDevice:
    """AMD GPUs by index or driver name, one per pipeline stage; by default the first.

    Memory is allocated in stream order and cached by the HIP driver. Raises ArtifactError.
    """
    if not sf.amdgpu.is_available():
        raise ArtifactError("this shortfin was built without AMD GPU support; install shortfin 3.9 from PyPI")
    builder = sf.amdgpu.SystemBuilder(amdgpu_async_allocations=True, amdgpu_async_caching=True)
    try:
        available = list(builder.available_devices)
    except Exception as error:
        if "libamdhip64" in str(error):
            raise ArtifactError(
                "the HIP runtime (libamdhip64.so) was not found; install ROCm, point IREE_HIP_DYLIB_PATH "
                "at it, or use `--device cpu`"
            ) from None
        raise ArtifactError(f"the AMD GPU driver cannot be used ({error}); try `--device cpu`") from None
    builder.visible_devices = [_select(device_id, available) for device_id in device_ids or ("0",)]
    try:
        system = builder.create_system()
    except Exception as error:
        raise ArtifactError(f"the AMD GPU cannot be opened ({error})") from None
    return ShortfinDevice(system, unified=False)


def _select(device_id: str, available: Sequence[str]) -> str:
    if not available:
        raise ArtifactError("no AMD GPU was found; check `rocminfo`, or use `--device cpu`")
    if device_id in available:
        return device_id
    if device_id.isdecimal() and int(device_id) < len(available):
        return available[int(device_id)]
    raise ArtifactError(f"there is no AMD GPU {device_id!r}; available are {', '.join(available)}")


class ShortfinBuffer:
    """An array on the device, or still on the host until an invocation first needs it."""

    def __init__(
        self, device: ShortfinDevice, shape: tuple[int, ...], dtype: np.dtype[Any], content: Any
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.staged: Array | None = content if isinstance(content, np.ndarray) else None
        self.array: Any = content if self.staged is None else None
        self._device = device

    def __del__(self) -> None:
        if self.array is not None:
            self._device.dispose(self.array)


class ShortfinPending:
    """An invocation in flight."""

    def __init__(self, future: Future[Sequence[ShortfinBuffer]]) -> None:
        self._future = future

    def wait(self) -> Sequence[DeviceBuffer]:
        try:
            return self._future.result()
        except Exception as error:
            if "unique semaphore capacity" in str(error):
                raise InvocationError("the device failed too often to go on; restart the server") from None
            raise InvocationError(f"the device failed under this invocation ({error})") from None


class ShortfinProgram:
    def __init__(
        self, device: ShortfinDevice, functions: dict[str, Any], exports: Mapping[str, Export]
    ) -> None:
        self._device = device
        self._functions = functions
        self._entries = MappingProxyType({name: e.signature for name, e in exports.items()})

    @property
    def entries(self) -> Mapping[str, EntrySignature]:
        return self._entries

    def submit(self, entry: str, arguments: Sequence[DeviceBuffer]) -> ShortfinPending:
        buffers = [cast(ShortfinBuffer, argument) for argument in arguments]
        return ShortfinPending(self._device.invoke(self._functions[entry], buffers))

    def release(self) -> None:
        """Frees the functions; to be called on the worker, before the system shuts down."""
        self._functions.clear()


class _Call(sf.Message):  # type: ignore[misc]
    """Work for the process to start; it should not wait for the device unless it must."""

    def __init__(self, start: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self.start = start


class _Process(sf.Process):  # type: ignore[misc]
    """Runs calls in the order they were queued, until the queue is closed."""

    def __init__(self, reader: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._reader = reader
        self.ended: Future[None] = Future()

    async def run(self) -> None:
        try:
            while (call := await self._reader()) is not None:
                await call.start()
                del call
        finally:
            self.ended.set_result(None)


class _Completion:
    """Completes when all work submitted to the device so far has completed."""

    def __init__(self, device: Any) -> None:
        self._iterator = device.__await__()  # fixes its point of the timeline here, not when awaited

    def __await__(self) -> Generator[Any, None, None]:
        return cast(Generator[Any, None, None], self._iterator)


class ShortfinDevice:
    """`unified`: the host may read and write device memory."""

    def __init__(self, system: Any, unified: bool) -> None:
        self._system = system
        self._unified = unified
        self._worker = system.create_worker("device")
        self._fiber = system.create_fiber(self._worker)
        self._queue = system.create_queue()
        self._process = _Process(self._queue.reader(), fiber=self._fiber)
        self._process.launch()
        self._disposed: list[Any] = []
        self._in_flight: set[asyncio.Task[None]] = set()  # one for each invocation; the worker's
        self._buffers: WeakSet[ShortfinBuffer] = WeakSet()
        self._programs: list[ShortfinProgram] = []
        self._is_leaked = False
        self._closed = False
        atexit.register(self.close)  # an open system keeps the process from exiting

    @property
    def name(self) -> str:
        return str(self._system.device_names[0])

    def load_program(self, vmfb: Path, parameters: Sequence[Path], module_name: str) -> ShortfinProgram:
        exports = read_exports(vmfb, module_name)
        open_parameters(parameters)  # for its checks
        try:
            provider = sf.StaticProgramParameters(self._system, parameter_scope=PARAMETER_SCOPE)
            for path in parameters:
                provider.load(str(path), mmap=True)
            modules = [
                sf.ProgramModule.parameter_provider(self._system, provider),
                sf.ProgramModule.load(self._system, str(vmfb), mmap=True),
            ]
            # One context for all fibers, as only the process above starts invocations.
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
    ) -> ShortfinBuffer:
        return self._call(lambda: self._allocate(shape, np.dtype(dtype), stage)).result()

    def upload(self, array: Array) -> ShortfinBuffer:
        return self._buffer(array.shape, array.dtype, np.array(array, order="C"))

    def download(self, buffer: DeviceBuffer) -> Array:
        source = cast(ShortfinBuffer, buffer)
        if source.staged is not None:
            return source.staged.copy()
        if self._unified:
            return _read(source.array, source.shape, source.dtype)
        return self._call(lambda: self._fetch(source)).result()

    def clear(self, buffer: DeviceBuffer, rows: Sequence[int]) -> None:
        array = cast(ShortfinBuffer, buffer).array
        if not self._unified:
            self._call(lambda: self._fill(array, rows)).result()
            return
        with array.storage.map(read=True, write=True) as mapping:
            content = np.frombuffer(mapping, np.uint8).reshape(buffer.shape[0], -1)
            content[list(rows)] = 0

    def invoke(self, function: Any, buffers: Sequence[ShortfinBuffer]) -> Future[Sequence[ShortfinBuffer]]:
        """Queues a call of `function`; the future fails if the invocation does."""
        future: Future[Sequence[ShortfinBuffer]] = Future()
        self._queue.write_nodelay(_Call(lambda: self._invoke(function, buffers, future)))
        return future

    def dispose(self, array: Any) -> None:
        """Has the worker free an array; callable from any thread."""
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
        del self._process, self._queue, self._fiber, self._worker
        self._system.shutdown()

    def _buffer(self, shape: tuple[int, ...], dtype: np.dtype[Any], content: Any) -> ShortfinBuffer:
        buffer = ShortfinBuffer(self, shape, dtype, content)
        self._buffers.add(buffer)
        return buffer

    def _call(self, work: Callable[[], Awaitable[T]]) -> Future[T]:
        """Runs `work` on the worker, after all work queued before."""
        future: Future[T] = Future()

        async def start() -> None:
            try:
                future.set_result(await work())
            except Exception as error:
                future.set_exception(error)

        self._queue.write_nodelay(_Call(start))
        return future

    # The methods below run on the worker.

    async def _invoke(
        self, function: Any, buffers: Sequence[ShortfinBuffer], future: Future[Sequence[ShortfinBuffer]]
    ) -> None:
        self._disposed.clear()
        fiber = self._fiber
        try:
            await self._put_on_device([b for b in buffers if b.staged is not None])
            results = await function(*(b.array for b in buffers), fiber=fiber)
            completion = _Completion(fiber.device(0))
        except Exception as error:
            self._replace_fiber()
            future.set_exception(error)
            return
        task = self._worker.loop.create_task(self._complete(completion, fiber, results, buffers, future))
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)

    async def _complete(
        self,
        completion: _Completion,
        fiber: Any,
        results: Any,
        buffers: Sequence[ShortfinBuffer],  # kept alive until here
        future: Future[Sequence[ShortfinBuffer]],
    ) -> None:
        try:
            await completion
            future.set_result([self._result(array) for array in results])
        except Exception as error:
            if fiber is self._fiber:
                self._replace_fiber()
            future.set_exception(error)

    def _result(self, array: Any) -> ShortfinBuffer:
        return self._buffer(tuple(array.shape), _DTYPES[str(array.dtype)], array)

    async def _put_on_device(self, staged: Sequence[ShortfinBuffer]) -> None:
        if staged and self._unified:
            await _Completion(self._fiber.device(0))  # else allocating would wait, holding the GIL
        for buffer in staged:
            array = self._new_array(buffer.shape, buffer.dtype, stage=0)
            host = array if self._unified else array.for_transfer()
            _write(host, cast(Array, buffer.staged))
            if host is not array:
                host.copy_to(array)
            buffer.array, buffer.staged = array, None

    async def _allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any], stage: int) -> ShortfinBuffer:
        if self._unified:
            await _Completion(self._fiber.device(0))
        array = self._new_array(shape, dtype, stage)
        array.fill(_ZERO)
        await _Completion(array.device)
        return self._buffer(shape, dtype, array)

    async def _fetch(self, source: ShortfinBuffer) -> Array:
        host = source.array.for_transfer()
        host.copy_from(source.array)
        await _Completion(source.array.device)
        return _read(host, source.shape, source.dtype)

    async def _fill(self, array: Any, rows: Sequence[int]) -> None:
        if self._is_leaked:
            # Work on an array may wait for the fiber that it was made on, which may have been retired.
            logger.warning("pages of a request that failed are not cleared, as the device has failed before")
            return
        for row in rows:
            array.view(row).fill(_ZERO)
        await _Completion(array.device)

    async def _release(self) -> None:
        # The timeline may complete before these tasks have, and they cannot run after the queue is closed.
        for task in list(self._in_flight):
            await task
        for ordinal in range(len(self._fiber.raw_devices)):
            await _Completion(self._fiber.device(ordinal))
        for buffer in list(self._buffers):
            buffer.array = buffer.staged = None
        self._disposed.clear()
        for program in self._programs:
            program.release()

    def _new_array(self, shape: tuple[int, ...], dtype: np.dtype[Any], stage: int) -> Any:
        device = self._fiber.device(stage % len(self._fiber.raw_devices))
        return sfnp.device_array.for_device(device, list(shape), _ELEMENTS[dtype])

    def _replace_fiber(self) -> None:
        self._fiber = self._system.create_fiber(self._worker)
        self._leak_system()

    def _leak_system(self) -> None:
        """Keeps the system alive beyond interpreter exit.

        A system waits for all arrays before it is destroyed, and those of a retired fiber are freed only when
        its timeline advances, which it never does.
        """
        if not self._is_leaked:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._system))
            self._is_leaked = True


def _write(array: Any, content: Array) -> None:
    with array.storage.map(discard=True) as mapping:
        memoryview(mapping).cast("B")[:] = content.reshape(-1).view(np.uint8).data


def _read(array: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    with array.storage.map(read=True) as mapping:
        return np.frombuffer(mapping, np.uint8).copy().view(dtype).reshape(shape)
