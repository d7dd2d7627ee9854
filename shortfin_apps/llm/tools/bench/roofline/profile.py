"""Sampling profiler: the CPU time that an entry spends in each dispatch.

A VMFB for CPUs contains machine code as an ELF file with debug information. The runtime copies the ELF
segments to memory; the profiler finds the copies by comparing the process's executable mappings with the
code. Linux perf events sample the instruction pointers of this process's threads. Each thread has an event
of its software CPU clock, which writes one record per tick with only the instruction pointer. Layouts are
from `linux/perf_event.h`, with attributes of version 0 (64 bytes).
"""

from __future__ import annotations

import ctypes
import errno
import io
import mmap
import os
import platform
import struct
import zipfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shortfin_apps.llm.components.batching.batch import Batch
from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.contract.errors import InvalidRequestError

PERIOD_NS = 250_000
_SYSCALLS = {"x86_64": 298, "aarch64": 241}  # of perf_event_open
_TYPE_SOFTWARE, _CPU_CLOCK, _SAMPLE_IP = 1, 0, 1
_DISABLED, _EXCLUDE_KERNEL = 1 << 0, 1 << 5
_ATTRIBUTES = struct.Struct("<IIQQQQQ")  # type, size, config, period, sample type, read format, flags
_ATTRIBUTES_SIZE = 64
_ENABLE, _DISABLE = 0x2400, 0x2401
_HEAD_OFFSET = 1024  # byte offset of data_head in the first page; data_tail follows it
_RECORD = struct.Struct("<IHH")  # type, misc, size
_RECORD_SAMPLE = 9
_RING_PAGES = 256  # the kernel needs a power of two; enough for several seconds of ticks


class Sampler:
    """The perf events of the threads that were passed to `open`. Used by `sampling`."""

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
        """Yield the instruction pointers of all ticks, one thread after the other."""
        for ring in self._rings:
            yield from _addresses(ring)

    def close(self) -> None:
        for ring in self._rings:
            ring.close()
        for file in self._files:
            os.close(file)


@contextmanager
def sampling() -> Iterator[list[int]]:
    """Sample this process's threads during the context; the yielded list is filled when the context exits.

    The list has one instruction address per PERIOD_NS of CPU time. Threads started later are not sampled.
    Raises InvalidRequestError if the system does not allow a process to sample itself.
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
    # Sample time in the kernel too, if that is permitted.
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


PROFILE_S = 1.0  # of back-to-back invocations
OUTSIDE = "outside of dispatches"  # scheduling, waiting, and the operating system


@dataclass(frozen=True, slots=True)
class Function:
    """The machine code of one dispatch: ELF addresses from `begin` (inclusive) to `end` (exclusive)."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Share:
    """CPU time of one dispatch per invocation, summed over all threads."""

    name: str
    cpu_s: float
    share: float  # of all samples


class CodeMap:
    """Maps an address in this process to a dispatch; `bases`: load addresses of the program's copies."""

    def __init__(self, functions: Iterable[Function], bases: Iterable[int]) -> None:
        self._functions = sorted(functions, key=lambda function: function.begin)
        self._begins = [function.begin for function in self._functions]
        self._bases = list(bases)

    def name_of(self, address: int) -> str:
        return next(filter(None, (self._name_at(address - base) for base in self._bases)), OUTSIDE)

    def _name_at(self, offset: int) -> str | None:
        index = bisect_right(self._begins, offset) - 1
        is_inside = index >= 0 and offset < self._functions[index].end
        return self._functions[index].name if is_inside else None


def load_code_map(vmfb: Path) -> CodeMap:
    """Return the code map of a program that this process has loaded.

    Raises InvalidRequestError if the program is not for CPUs or not found in memory.
    """
    with zipfile.ZipFile(vmfb) as archive:
        names = [name for name in archive.namelist() if name.endswith(".so")]
        if len(names) != 1:
            raise InvalidRequestError(f"{vmfb}: --profile supports only programs for CPUs", "profile")
        from elftools.elf.elffile import ELFFile  # an extra

        elf = ELFFile(io.BytesIO(archive.read(names[0])))
    return CodeMap(functions_of(elf), _load_addresses(elf))


def functions_of(elf: Any) -> Iterator[Function]:
    """Yield the functions in the DWARF debug information, as the ELF file has no symbol table."""
    for unit in elf.get_dwarf_info().iter_CUs():
        for entry in unit.iter_DIEs():
            if entry.tag == "DW_TAG_subprogram" and "DW_AT_low_pc" in entry.attributes:
                begin = entry.attributes["DW_AT_low_pc"].value
                size = entry.attributes["DW_AT_high_pc"].value  # an offset from low_pc, since DWARF 4
                if begin:  # the linker sets 0 for a duplicate that it dropped
                    yield Function(entry.attributes["DW_AT_name"].value.decode(), begin, begin + size)


def profile(runner: BatchRunner, batch: Batch, code: CodeMap) -> list[Share]:
    """Sample back-to-back invocations for PROFILE_S; return the dispatches, most CPU time first."""
    runner.run(batch)
    runs, begin = 0, runner.device_s
    with sampling() as addresses:
        while runner.device_s - begin < PROFILE_S:
            runner.run(batch)
            runs += 1
    return shares(Counter(map(code.name_of, addresses)), runs)


def shares(samples: Counter[str], runs: int) -> list[Share]:
    total = samples.total()
    return [
        Share(name, count * PERIOD_NS / 1e9 / runs, count / total) for name, count in samples.most_common()
    ]


def _load_addresses(elf: Any) -> list[int]:
    """Find the load addresses of all copies of the program in this process by comparing code bytes."""
    segment = next(s for s in elf.iter_segments("PT_LOAD") if s["p_flags"] & 1)  # PF_X
    code = segment.data()
    within = segment["p_vaddr"] % 4096
    found = [
        int(begin + within - segment["p_vaddr"])
        for begin, end in _anonymous_code()
        if end - begin >= within + len(code) and ctypes.string_at(begin + within, len(code)) == code
    ]
    if not found:
        raise InvalidRequestError("--profile did not find the program's code in this process", "profile")
    return found


def _anonymous_code() -> Iterator[Sequence[int]]:
    """Yield begin and end address of each anonymous executable mapping of this process."""
    for line in filter(None, os.fsdecode(Path("/proc/self/maps").read_bytes()).split("\n")):
        place, permissions, _, _, inode, *name = line.split()
        if "x" in permissions and "r" in permissions and inode == "0" and not name:
            yield [int(part, 16) for part in place.split("-")]
