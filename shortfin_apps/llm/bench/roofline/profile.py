"""Which dispatches an entry spends its processor time in: the running model is sampled, not taken apart.

A VMFB for CPUs carries its machine code as an ELF file with debug information. The runtime copies that file's
segments into memory; where, is found by looking for the code itself among the process's mappings.
"""

from __future__ import annotations

import ctypes
import io
import zipfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile

from shortfin_apps.llm.bench.roofline.measure import Runner
from shortfin_apps.llm.bench.roofline.perf_events import PERIOD_NS, sampling
from shortfin_apps.llm.components.batching.batch import Batch
from shortfin_apps.llm.errors import InvalidRequestError

PROFILE_S = 1.0  # of invocations back to back
OUTSIDE = "outside of dispatches"  # scheduling them, waiting for them, and the system


@dataclass(frozen=True, slots=True)
class Function:
    """One dispatch's machine code, at `[begin, end)` in the ELF file's own addresses."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Share:
    """Processor time of one dispatch, of all threads together, in one invocation."""

    name: str
    cpu_s: float
    share: float  # of all samples


class CodeMap:
    """Names the dispatch that an address in this process belongs to; `bases` are of its copies."""

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
    """Of a program that this process has loaded. Raises InvalidRequestError when it is not for a CPU."""
    with zipfile.ZipFile(vmfb) as archive:
        names = [name for name in archive.namelist() if name.endswith(".so")]
        if len(names) != 1:
            raise InvalidRequestError(f"{vmfb}: --profile knows programs for CPUs alone", "profile")
        elf = ELFFile(io.BytesIO(archive.read(names[0])))
    return CodeMap(functions_of(elf), _load_addresses(elf))


def functions_of(elf: Any) -> Iterator[Function]:
    """From the debug information, as the file has no symbols."""
    for unit in elf.get_dwarf_info().iter_CUs():
        for entry in unit.iter_DIEs():
            if entry.tag == "DW_TAG_subprogram" and "DW_AT_low_pc" in entry.attributes:
                begin = entry.attributes["DW_AT_low_pc"].value
                size = entry.attributes["DW_AT_high_pc"].value  # an offset from it, since DWARF 4
                if begin:  # what the linker dropped as a duplicate stands at 0
                    yield Function(entry.attributes["DW_AT_name"].value.decode(), begin, begin + size)


def profile(runner: Runner, batch: Batch, code: CodeMap) -> list[Share]:
    """Samples invocations back to back; the largest share first."""
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
    """Several where the process has loaded the program several times: each copy is the same to the byte."""
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
    """Executable mappings without a file behind them."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        place, permissions, _, _, inode, *name = line.split()
        if "x" in permissions and "r" in permissions and inode == "0" and not name:
            yield [int(part, 16) for part in place.split("-")]
