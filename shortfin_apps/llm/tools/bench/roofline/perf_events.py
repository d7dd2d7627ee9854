"""Samples the instruction pointers of this process's threads with Linux perf events.

Layouts are from `linux/perf_event.h`: version 0 attributes, the software CPU clock of each thread, and one
record per tick with only the instruction pointer.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from shortfin_apps.llm.contract.errors import InvalidRequestError

PERIOD_NS = 250_000
_SYSCALLS = {"x86_64": 298, "aarch64": 241}  # of perf_event_open
_TYPE_SOFTWARE, _CPU_CLOCK, _SAMPLE_IP = 1, 0, 1
_DISABLED, _EXCLUDE_KERNEL = 1 << 0, 1 << 5
_ATTRIBUTES = struct.Struct("<IIQQQQQ")  # type, size, config, period, sample type, read format, flags
_ATTRIBUTES_SIZE = 64
_ENABLE, _DISABLE = 0x2400, 0x2401
_HEAD_OFFSET = 1024  # of data_head in the first page; data_tail follows
_RECORD = struct.Struct("<IHH")  # type, misc, size
_RECORD_SAMPLE = 9
_RING_PAGES = 256  # a power of two: seconds of ticks


class Sampler:
    """The perf events of all threads alive at construction. Used by `sampling`."""

    def __init__(self) -> None:
        self._files: list[int] = []
        self._rings: list[mmap.mmap] = []

    def open(self, thread: int) -> None:
        file = _open_event(thread)
        self._files.append(file)
        self._rings.append(mmap.mmap(file, (1 + _RING_PAGES) * mmap.PAGESIZE))

    def switch(self, on: bool) -> None:
        for file in self._files:
            _ioctl(file, _ENABLE if on else _DISABLE)

    def addresses(self) -> Iterator[int]:
        """The instruction pointers of all ticks, unordered between threads."""
        for ring in self._rings:
            yield from _addresses(ring)

    def close(self) -> None:
        for ring in self._rings:
            ring.close()
        for file in self._files:
            os.close(file)


@contextmanager
def sampling() -> Iterator[list[int]]:
    """Sample this process's threads in a context; the yielded list is filled when it exits.

    One address per PERIOD_NS of CPU time. Raises InvalidRequestError if the system does not allow a process
    to sample itself.
    """
    addresses: list[int] = []
    with ExitStack() as stack:
        sampler = Sampler()
        stack.callback(sampler.close)
        for task in Path("/proc/self/task").iterdir():
            with suppress(ProcessLookupError):  # the thread has ended meanwhile
                sampler.open(int(task.name))
        sampler.switch(on=True)
        yield addresses
        sampler.switch(on=False)
        addresses += sampler.addresses()


def _open_event(thread: int) -> int:
    # With kernel time if permitted, otherwise without.
    for flags in (_DISABLED, _DISABLED | _EXCLUDE_KERNEL):
        attributes = _ATTRIBUTES.pack(
            _TYPE_SOFTWARE, _ATTRIBUTES_SIZE, _CPU_CLOCK, PERIOD_NS, _SAMPLE_IP, 0, flags
        )
        buffer = ctypes.create_string_buffer(attributes, _ATTRIBUTES_SIZE)
        file = _libc().syscall(_syscall_number(), buffer, thread, -1, -1, 0)
        if file >= 0:
            return int(file)
    reason = os.strerror(ctypes.get_errno())
    if ctypes.get_errno() == errno.ESRCH:
        raise ProcessLookupError(errno.ESRCH, reason)
    raise InvalidRequestError(
        f"this system does not let a process sample itself ({reason}); --profile needs perf events, "
        "see kernel.perf_event_paranoid",
        "profile",
    )


def _syscall_number() -> int:
    number = _SYSCALLS.get(platform.machine()) if platform.system() == "Linux" else None
    if number is None:
        raise InvalidRequestError("--profile needs Linux on x86-64 or AArch64", "profile")
    return number


def _addresses(ring: mmap.mmap) -> Iterator[int]:
    head, tail = struct.unpack_from("<QQ", ring, _HEAD_OFFSET)
    data = ring[mmap.PAGESIZE :]
    size = len(data)
    while tail < head:
        kind, _, length = _RECORD.unpack_from(data, tail % size)  # records are 8-byte aligned
        if kind == _RECORD_SAMPLE:
            yield struct.unpack_from("<Q", data, (tail + _RECORD.size) % size)[0]
        tail += length


def _ioctl(file: int, request: int) -> None:
    if _libc().ioctl(file, request, 0) < 0:
        raise OSError(ctypes.get_errno(), "a perf event cannot be switched")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
