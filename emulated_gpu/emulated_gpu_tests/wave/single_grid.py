"""Runs machine code over a grid of workgroups without HIP, for tests of the executor."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from emulated_gpu.chips import Chip
from emulated_gpu.control import Finding
from emulated_gpu.translate import translate_code
from emulated_gpu.translate.program import Class
from emulated_gpu_tests.devices import loaded

_COUNTERS = (
    *("loaded_bytes", "stored_bytes", "loaded_lines", "stored_lines", "unique_loaded_bytes"),
    *("unique_stored_bytes", "lds_bytes", "lds_conflict_cycles", "matrix_operations"),
)
_NUM_CLASSES = len(Class)


class _Run(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("max_instructions", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("counts_unique_bytes", ctypes.c_uint32),
        ("resident", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("status", ctypes.c_uint32),
        ("instructions", ctypes.c_uint64 * _NUM_CLASSES),
        *((name, ctypes.c_uint64) for name in _COUNTERS),
    )


@dataclass(frozen=True)
class GridResult:
    """The result of a launch. `status`: 0, or a value of `enum launch_status` in wave/launch.h.

    `counters`: the fields of `counters_t` there; `instructions`: wave-instructions by class.
    """

    status: int
    instructions: Mapping[Class, int]
    counters: Mapping[str, int]
    findings: tuple[Finding, ...]


def run_grid(
    chip: Chip,
    code: bytes,
    *,
    workgroups: tuple[int, int, int] = (1, 1, 1),
    workgroup: tuple[int, int, int] | None = None,
    lds_bytes: int = 0,
    scratch_bytes: int = 0,
    max_instructions: int = 100_000,
    resident: int = 0,
    seed: int = 0,
    threads: int = 0,
) -> GridResult:
    """Execute `code`. `workgroup` is its number of lanes in three dimensions, by default one wave.

    `resident`: how many workgroups run at a time, 0 for any number; `seed`: of their order, which it
    determines if `threads` is 1. `threads`: of the host, 0 for as many as are useful.
    v0 starts as x | y << 10 | z << 20 of a lane in its workgroup.
    Clears the findings of this process. Raises ValueError if the program cannot be loaded.
    """
    control = loaded()
    control.clear_report()
    run = _Run(workgroups, workgroup or (chip.lanes, 1, 1), max_instructions, seed, 1, resident, threads)
    error = ctypes.create_string_buffer(300)
    library = control.library
    library.single_grid_run.restype = ctypes.c_bool
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program"
        program.write_bytes(translate_code(chip, code, lds_bytes=lds_bytes, scratch_bytes=scratch_bytes))
        if not library.single_grid_run(str(program).encode(), ctypes.byref(run), error, len(error)):
            raise ValueError(error.value.decode())
    return GridResult(
        run.status,
        {each: run.instructions[each] for each in Class},
        {name: getattr(run, name) for name in _COUNTERS},
        control.report().findings,
    )
