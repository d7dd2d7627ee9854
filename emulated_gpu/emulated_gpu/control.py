"""Controls the emulated GPU beyond HIP's API: injected faults, stream order, findings, counters.

`Control` is for the process that has loaded the library. Another process, such as a server, writes its report
to the file EMULATED_GPU_REPORT, which `read_report` reads, and takes commands from the pipe
EMULATED_GPU_CONTROL.
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
    """An error of a kernel. README.md lists the values of `kind`. `lane` is -1 for an error of a whole wave.

    `code_address` is the instruction's address in the code object. `repetitions` is the number of further
    errors of this kind at this instruction. `other_wave` and, for `unordered`, the other fields that start so
    are about the wave and the instruction with which there is a conflict.
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
    other_workgroup: tuple[int, int, int] = (0, 0, 0)
    other_instruction: str = ""
    other_code_address: int = 0


@dataclass(frozen=True)
class Misuse:
    """A violation of HIP's rules by the process, which no call of HIP could return as an error."""

    what: str
    text: str
    address: int
    repetitions: int


@dataclass(frozen=True)
class KernelCounters:
    """Sums over all launches of a kernel.

    `instructions`: executed instructions by class (`wave/program.h`), counted once per wave.
    """

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
    """What the library has observed. `calls`: by HIP function; `kernels`: counters by kernel name."""

    calls: Mapping[str, int]
    devices: tuple[DeviceState, ...]
    kernels: Mapping[str, KernelCounters]
    findings: tuple[Finding, ...]
    misuses: tuple[Misuse, ...]


class Control:
    """Controls the library in this process, and loads it if the process has not loaded it yet."""

    def __init__(self, library: Path | None = None) -> None:
        self.library = ctypes.CDLL(str(library or build_library()))
        self.library.emulated_gpu_command.restype = ctypes.c_bool
        self.library.emulated_gpu_report.restype = ctypes.c_void_p
        self.library.emulated_gpu_free.argtypes = [ctypes.c_void_p]

    def command(self, text: str) -> None:
        """Execute a command of `hip/faults.c`. Raises EmulatedGpuError for an invalid command."""
        if not self.library.emulated_gpu_command(text.encode()):
            raise EmulatedGpuError(f"the command {text!r} is not understood")

    def report(self) -> Report:
        """Return what was observed since the last `clear_report`. `calls` are counted from the start."""
        pointer = self.library.emulated_gpu_report()
        text = ctypes.string_at(pointer)
        self.library.emulated_gpu_free(pointer)
        return _report_of(json.loads(text))

    def clear_report(self) -> None:
        self.library.emulated_gpu_clear_report()


def read_report(path: Path) -> Report | tuple[Finding | Misuse, ...]:
    """Read the report file of a process.

    Returns the complete report if the process has exited normally. For a process that runs or was killed,
    returns its findings and misuses so far.
    """
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
    return Finding(
        **{
            **entry,
            "workgroup": tuple(entry["workgroup"]),
            "other_workgroup": tuple(entry["other_workgroup"]),
        }
    )
