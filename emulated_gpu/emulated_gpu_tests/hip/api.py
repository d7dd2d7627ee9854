"""HIP's interface for tests: calls by name that raise what HIP returns, and the few things they need."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

# hipError_t
INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONFIGURATION, INVALID_FUNCTION = 1, 2, 9, 98
NO_DEVICE, INVALID_DEVICE, INVALID_IMAGE, NO_BINARY, INVALID_HANDLE = 100, 101, 200, 209, 400
NOT_FOUND, NOT_READY, ILLEGAL_ADDRESS, PEER_ENABLED = 500, 600, 700, 704
ALREADY_REGISTERED, NOT_REGISTERED, LAUNCH_FAILURE, NOT_SUPPORTED = 712, 713, 719, 801

NON_BLOCKING = 1
COPY_KIND = 4  # hipMemcpyDefault
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

Handle = ctypes.c_void_p


class HipError(Exception):
    """A call returned `number`."""

    def __init__(self, function: str, number: int) -> None:
        super().__init__(f"{function} returned {number}")
        self.number = number


@dataclass
class Hip:
    """The library's functions. Sizes and addresses are plain integers."""

    library: ctypes.CDLL

    def call(self, name: str, *arguments: object) -> None:
        """Calls a function; raises HipError unless it returns hipSuccess."""
        status = getattr(self.library, name)(*(_wide(argument) for argument in arguments))
        if status:
            raise HipError(name, status)

    def make(self, name: str, *arguments: object) -> Handle:
        """Calls a function whose first parameter is where a handle or an address goes."""
        handle = Handle()
        self.call(name, ctypes.byref(handle), *arguments)
        return handle

    def malloc(self, size: int) -> int:
        return self.make("hipMalloc", size).value or 0

    def stream(self, flags: int = NON_BLOCKING) -> Handle:
        return self.make("hipStreamCreateWithFlags", ctypes.c_uint(flags))

    def event(self) -> Handle:
        return self.make("hipEventCreate")

    def is_done(self, event: Handle) -> bool:
        try:
            self.call("hipEventQuery", event)
        except HipError as error:
            if error.number == NOT_READY:
                return False
            raise
        return True

    def set_device(self, ordinal: int) -> None:
        self.call("hipSetDevice", ctypes.c_int(ordinal))

    def read(self, address: int, size: int) -> bytes:
        """Copies device memory to the host, in the null stream of the current device."""
        buffer = ctypes.create_string_buffer(size)
        self.call("hipMemcpy", buffer, address, size, ctypes.c_int(COPY_KIND))
        return buffer.raw

    def write(self, address: int, data: bytes) -> None:
        self.call(
            "hipMemcpy", address, ctypes.create_string_buffer(data, len(data)), len(data), ctypes.c_int(4)
        )

    def copy_async(self, to: object, source: object, size: int, stream: Handle | None) -> None:
        self.call("hipMemcpyAsync", to, source, size, ctypes.c_int(COPY_KIND), stream)

    def fill_async(self, address: int, value: int, size: int, stream: Handle | None) -> None:
        self.call("hipMemsetAsync", address, ctypes.c_int(value), size, stream)

    def call_host(self, stream: Handle | None, function: Callable[[], None]) -> object:
        """Puts a call of `function` into a stream. Keep what is returned until it has been called."""
        kept = HOST_FUNCTION(lambda _: function())
        self.call("hipLaunchHostFunc", stream, kept, None)
        return kept

    def synchronise(self, stream: Handle | None) -> None:
        self.call("hipStreamSynchronize", stream)


def _wide(argument: object) -> object:
    """Plain integers are sizes and addresses, so 64 bits wide."""
    return ctypes.c_uint64(argument) if isinstance(argument, int) else argument


def raises(number: int) -> pytest.RaisesExc[HipError]:
    """Expects a call to return this error."""
    return pytest.RaisesExc(HipError, check=lambda error: error.number == number)


assert sys.byteorder == "little"
