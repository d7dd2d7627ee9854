"""Controls the emulated GPU beyond HIP's interface: injected faults, findings, counters, stream order.

`Control` works in the process that has loaded the library. `read_report` reads what another process (a
server) wrote to its EMULATED_GPU_REPORT; such a process takes commands from the pipe EMULATED_GPU_CONTROL.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from emulated_gpu.errors import EmulatedGpuError
from emulated_gpu.library import build_library


@dataclass(frozen=True)
class Finding:
    """An error of a kernel; README.md lists the values of `kind`. `lane` is -1 for the whole wave.

    `code_address` is the instruction's address in the code object. Repetitions at one instruction are merged.
    """

    kind: str
    kernel: str
    instruction: str
    workgroup: tuple[int, int, int]
    wave: int
    other_wave: int
    lane: int
    code_address: int
    address: int
    repetitions: int


@dataclass(frozen=True)
class Misuse:
    """A violation of HIP's rules by the process that no call could report as an error."""

    what: str
    text: str
    address: int
    repetitions: int


@dataclass(frozen=True)
class KernelCounters:
    """Sums over a kernel's launches. `instructions`: wave-instructions by class (`wave/program.h`)."""

    launches: int
    instructions: Mapping[str, int]
    loaded_bytes: int
    stored_bytes: int
    loaded_lines: int
    stored_lines: int
    unique_loaded_bytes: int
    unique_stored_bytes: int
    lds_bytes: int
    lds_conflict_cycles: int
    matrix_operations: int


@dataclass(frozen=True)
class DeviceState:
    """A device's memory in bytes, and the name of its current error."""

    memory_bytes: int
    used_bytes: int
    peak_bytes: int
    error: str


@dataclass(frozen=True)
class Report:
    """The library's observations. `calls`: counts by function name."""

    calls: Mapping[str, int]
    devices: tuple[DeviceState, ...]
    kernels: Mapping[str, KernelCounters]
    findings: tuple[Finding, ...]
    misuses: tuple[Misuse, ...]


class Control:
    """The library loaded into this process; loads it if necessary."""

    def __init__(self, library: Path | None = None) -> None:
        self.library = ctypes.CDLL(str(library or build_library()))
        self.library.emulated_gpu_command.restype = ctypes.c_bool
        self.library.emulated_gpu_report.restype = ctypes.c_void_p
        self.library.emulated_gpu_free.argtypes = [ctypes.c_void_p]

    def command(self, text: str) -> None:
        """Execute a command of `hip/faults.c`. Raises EmulatedGpuError if it is invalid."""
        if not self.library.emulated_gpu_command(text.encode()):
            raise EmulatedGpuError(f"the command {text!r} is not understood")

    def report(self) -> Report:
        """Return observations since the last `clear_report`; `calls` are counted from the start."""
        pointer = self.library.emulated_gpu_report()
        text = ctypes.string_at(pointer)
        self.library.emulated_gpu_free(pointer)
        return _report_of(json.loads(text))

    def clear_report(self) -> None:
        self.library.emulated_gpu_clear_report()


def read_report(path: Path) -> Report | tuple[Finding | Misuse, ...]:
    """Return an exited process's summary; for a running or killed process, its findings so far."""
    found: list[Finding | Misuse] = []
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if "summary" in entry:
            return _report_of(entry["summary"])
        found.append(_finding_of(entry["finding"]) if "finding" in entry else Misuse(**entry["misuse"]))
    return tuple(found)


def _report_of(entry: dict[str, Any]) -> Report:
    assert entry.keys() == {f.name for f in fields(Report)}
    return Report(
        calls=entry["calls"],
        devices=tuple(DeviceState(**device) for device in entry["devices"]),
        kernels={name: KernelCounters(**counters) for name, counters in entry["kernels"].items()},
        findings=tuple(map(_finding_of, entry["findings"])),
        misuses=tuple(Misuse(**misuse) for misuse in entry["misuses"]),
    )


def _finding_of(entry: dict[str, Any]) -> Finding:
    return Finding(**{**entry, "workgroup": tuple(entry["workgroup"])})
