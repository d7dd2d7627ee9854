"""The part of CUDA's driver API needed to time kernels, via ctypes: no package or compiler is needed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

_PTX = 1  # CU_JIT_INPUT_PTX
_LOCAL_BYTES, _REGISTERS, _MAX_SHARED = 3, 4, 8  # CUfunction_attribute
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class CudaError(Exception):
    """A call of the driver failed."""


@dataclass(frozen=True, slots=True)
class Function:
    """A loaded kernel, launched in workgroups of `threads` with `shared_bytes` of dynamic shared memory."""

    handle: int
    threads: int
    shared_bytes: int
    registers: int
    spilled_bytes: int  # local memory per thread


class Cuda:
    """Device 0 with its primary context, current in this thread, and one stream."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuStreamCreate", ctypes.byref(stream), 1)
        self._stream = stream
        name = ctypes.create_string_buffer(100)
        self._call("cuDeviceGetName", name, len(name), device)
        self.name = name.value.decode()

    def assemble(self, ptx: bytes) -> bytes:
        """Compile PTX to machine code with the driver's compiler."""
        link, image, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
        self._call("cuLinkCreate_v2", 0, None, None, ctypes.byref(link))
        text = ptx + b"\0"
        self._call("cuLinkAddData_v2", link, _PTX, text, ctypes.c_size_t(len(text)), b"ptx", 0, None, None)
        self._call("cuLinkComplete", link, ctypes.byref(image), ctypes.byref(size))
        code = ctypes.string_at(image, size.value)
        self._call("cuLinkDestroy", link)
        return code

    def load(self, image: bytes, name: str, threads: int, shared_bytes: int) -> Function:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), image)
        self._call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        self._call("cuFuncSetAttribute", function, _MAX_SHARED, shared_bytes)
        registers, spilled = (self._attribute(function, each) for each in (_REGISTERS, _LOCAL_BYTES))
        return Function(function.value or 0, threads, shared_bytes, registers, spilled)

    def allocate(self, num_bytes: int) -> int:
        """Allocate memory and return its address."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def fill(self, address: int, num_bytes: int, value: int) -> None:
        """Set each byte to `value`."""
        self._call(
            "cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(value), ctypes.c_size_t(num_bytes)
        )

    def fill_later(self, address: int, count: int, value: int) -> None:
        """Queue a fill of `count` words of 32 bits with `value`."""
        word = ctypes.c_uint(value)
        self._call("cuMemsetD32Async", ctypes.c_uint64(address), word, ctypes.c_size_t(count), self._stream)

    def upload(self, address: int, data: bytes) -> None:
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        addresses = ctypes.c_uint64(target), ctypes.c_uint64(source)
        self._call("cuMemcpyDtoD_v2", *addresses, ctypes.c_size_t(num_bytes))

    def download(self, address: int, num_bytes: int) -> bytes:
        self.wait()
        data = ctypes.create_string_buffer(num_bytes)
        self._call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))
        return data.raw

    def launch(
        self, function: Function, grid: Sequence[int], addresses: Sequence[int], numbers: Sequence[int]
    ) -> None:
        """Launch a kernel with pointers to memory, then i32 numbers, as arguments."""
        values = [*map(ctypes.c_uint64, addresses), *map(ctypes.c_int32, numbers)]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        x, y, z = [*grid, 1, 1][:3]
        shape = x, y, z, function.threads, 1, 1, function.shared_bytes
        self._call("cuLaunchKernel", ctypes.c_void_p(function.handle), *shape, self._stream, pointers, None)

    def wait(self) -> None:
        """Wait for all queued work; copies and fills are not ordered with launches."""
        self._call("cuCtxSynchronize")

    def times_s(self, launches: Callable[[], None], repeats: int) -> list[float]:
        """Capture what `launches` queues as a graph, and return its time in seconds for each of `repeats`."""
        with self._graph(launches) as graph:
            self._call("cuGraphLaunch", graph, self._stream)
            return [
                self._time_s(lambda: self._call("cuGraphLaunch", graph, self._stream)) for _ in range(repeats)
            ]

    @contextmanager
    def _graph(self, launches: Callable[[], None]) -> Iterator[ctypes.c_void_p]:
        captured, graph = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuStreamBeginCapture_v2", self._stream, _THREAD_LOCAL)
        launches()
        self._call("cuStreamEndCapture", self._stream, ctypes.byref(captured))
        self._call("cuGraphInstantiateWithFlags", ctypes.byref(graph), captured, ctypes.c_uint64(0))
        yield graph
        self._call("cuGraphExecDestroy", graph)
        self._call("cuGraphDestroy", captured)

    def _time_s(self, queue: Callable[[], None]) -> float:
        events = ctypes.c_void_p(), ctypes.c_void_p()
        for event in events:
            self._call("cuEventCreate", ctypes.byref(event), 0)
        begin, end = events
        self._call("cuEventRecord", begin, self._stream)
        queue()
        self._call("cuEventRecord", end, self._stream)
        self.wait()
        milliseconds = ctypes.c_float()
        self._call("cuEventElapsedTime", ctypes.byref(milliseconds), begin, end)
        for event in events:
            self._call("cuEventDestroy_v2", event)
        return milliseconds.value / 1e3

    def _attribute(self, function: ctypes.c_void_p, attribute: int) -> int:
        value = ctypes.c_int()
        self._call("cuFuncGetAttribute", ctypes.byref(value), attribute, function)
        return value.value

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or b'unknown error').decode()}")
