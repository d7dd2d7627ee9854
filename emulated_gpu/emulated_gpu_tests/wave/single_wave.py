"""Runs machine code on one wave with given registers, for tests of operations."""

from __future__ import annotations

import ctypes
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from emulated_gpu.chips import Chip
from emulated_gpu.translate import translate_code
from emulated_gpu_tests.devices import loaded

NUM_VGPRS = 520
NUM_LANES = 64
VCC, M0, EXEC = 106, 124, 126
KEEP_DENORMALS = 0xF0  # MODE register: keep f32, f16 and f64 denormals, round to nearest even


class _Registers(ctypes.Structure):
    _fields_ = (
        ("v", ctypes.c_uint32 * NUM_LANES * NUM_VGPRS),
        ("v_defined", ctypes.c_uint64 * NUM_VGPRS),
        ("s", ctypes.c_uint32 * 128),
        ("s_defined", ctypes.c_uint8 * 128),
        ("scc", ctypes.c_uint32),
        ("mode", ctypes.c_uint32),
        ("status", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("executed", ctypes.c_uint64),
    )


@dataclass
class Wave:
    """Registers of a wave.

    `v`: (520, 64) uint32, accumulation registers from row 256; `s`: (128,) uint32, with VCC at 106,
    M0 at 124 and EXEC at 126; `v_defined`: (520,) uint64, a bit per lane; `lds`: uint8.
    """

    v: np.ndarray = field(default_factory=lambda: np.zeros((NUM_VGPRS, NUM_LANES), np.uint32))
    s: np.ndarray = field(default_factory=lambda: np.zeros(128, np.uint32))
    v_defined: np.ndarray = field(default_factory=lambda: np.full(NUM_VGPRS, 2**64 - 1, np.uint64))
    s_defined: np.ndarray = field(default_factory=lambda: np.ones(128, np.uint8))
    scc: int = 0
    mode: int = KEEP_DENORMALS
    lds: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    status: int = 0
    executed: int = 0

    def set_exec(self, lanes: int) -> None:
        self.s[EXEC : EXEC + 2] = lanes & 0xFFFFFFFF, lanes >> 32

    def run(self, chip: Chip, code: bytes, *, scratch_bytes: int = 0) -> None:
        """Execute `code`, which must end with s_endpgm, in place. Raises ValueError if it cannot be loaded.

        Sets `status` to 0 or a value of `enum launch_status` in wave/launch.h.
        """
        library = loaded().library
        registers = _Registers(scc=self.scc, mode=self.mode)
        views = [(np.ctypeslib.as_array(getattr(registers, name)), getattr(self, name)) for name in _ARRAYS]
        for inside, outside in views:
            inside[:] = outside
        lds = (ctypes.c_uint8 * max(1, self.lds.size)).from_buffer_copy(self.lds.tobytes() or b"\0")
        error = ctypes.create_string_buffer(300)
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder) / "program"
            program.write_bytes(
                translate_code(chip, code, lds_bytes=self.lds.size, scratch_bytes=scratch_bytes)
            )
            library.single_wave_run.restype = ctypes.c_bool
            if not library.single_wave_run(
                str(program).encode(), ctypes.byref(registers), lds, self.lds.size, error, len(error)
            ):
                raise ValueError(error.value.decode())
        for inside, outside in views:
            outside[:] = inside
        self.lds[:] = np.ctypeslib.as_array(lds)[: self.lds.size]
        self.scc, self.mode = registers.scc, registers.mode
        self.status, self.executed = registers.status, registers.executed


_ARRAYS = ("v", "v_defined", "s", "s_defined")
