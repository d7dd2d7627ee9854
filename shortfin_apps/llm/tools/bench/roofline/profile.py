"""Sampling profiler: the CPU time that an entry spends in each dispatch.

A VMFB for CPUs contains machine code as an ELF file with debug information. The runtime copies its segments
to memory; the profiler finds them by searching the process's mappings for the code.
"""

from __future__ import annotations

import ctypes
import io
import os
import zipfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shortfin_apps.llm.components.batching.batch import Batch
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.tools.bench.roofline.measure import Runner
from shortfin_apps.llm.tools.bench.roofline.perf_events import PERIOD_NS, sampling

PROFILE_S = 1.0  # of back-to-back invocations
OUTSIDE = "outside of dispatches"  # scheduling, waiting, and the operating system


@dataclass(frozen=True, slots=True)
class Function:
    """The machine code of one dispatch, at `[begin, end)` in the ELF file's addresses."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Share:
    """CPU time of one dispatch in one invocation, summed over all threads."""

    name: str
    cpu_s: float
    share: float  # of all samples


class CodeMap:
    """Maps an address in this process to a dispatch; `bases` are where the program's copies are loaded."""

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
    """The code map of a program loaded by this process. Raises InvalidRequestError unless it is for a CPU."""
    with zipfile.ZipFile(vmfb) as archive:
        names = [name for name in archive.namelist() if name.endswith(".so")]
        if len(names) != 1:
            raise InvalidRequestError(f"{vmfb}: --profile supports only programs for CPUs", "profile")
        from elftools.elf.elffile import ELFFile  # an extra

        elf = ELFFile(io.BytesIO(archive.read(names[0])))
    return CodeMap(functions_of(elf), _load_addresses(elf))


def functions_of(elf: Any) -> Iterator[Function]:
    """The functions in the debug information, as the file has no symbols."""
    for unit in elf.get_dwarf_info().iter_CUs():
        for entry in unit.iter_DIEs():
            if entry.tag == "DW_TAG_subprogram" and "DW_AT_low_pc" in entry.attributes:
                begin = entry.attributes["DW_AT_low_pc"].value
                size = entry.attributes["DW_AT_high_pc"].value  # an offset from low_pc, since DWARF 4
                if begin:  # 0 for duplicates dropped by the linker
                    yield Function(entry.attributes["DW_AT_name"].value.decode(), begin, begin + size)


def profile(runner: Runner, batch: Batch, code: CodeMap) -> list[Share]:
    """Sample back-to-back invocations; the largest share comes first."""
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
    """The load addresses of all copies of the program in this process, found by comparing bytes."""
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
    """Begin and end of the anonymous executable mappings."""
    for line in filter(None, os.fsdecode(Path("/proc/self/maps").read_bytes()).split("\n")):
        place, permissions, _, _, inode, *name = line.split()
        if "x" in permissions and "r" in permissions and inode == "0" and not name:
            yield [int(part, 16) for part in place.split("-")]
