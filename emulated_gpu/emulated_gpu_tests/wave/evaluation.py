"""Evaluates vector instructions on arrays, a value a lane."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
from tinygrad.runtime.autogen.amd.cdna import ins as cdna
from tinygrad.runtime.autogen.amd.rdna3 import ins as rdna3
from tinygrad.runtime.autogen.amd.rdna4 import ins as rdna4

from emulated_gpu.chips import CHIPS
from emulated_gpu_tests.wave.single_wave import KEEP_DENORMALS, VCC, Wave

Bits = npt.NDArray[Any]  # of unsigned integers

ALL_CHIPS = ("gfx942", "gfx950", "gfx1100", "gfx1201")  # others execute instructions as one of these
MODULES: dict[str, ModuleType] = {
    **dict.fromkeys(("gfx90a", "gfx942", "gfx950"), cdna),
    "gfx1100": rdna3,
    "gfx1201": rdna4,
}
IEEE = 1 << 9  # a bit of the MODE register

# In tinygrad's tables of CDNA, which are CDNA 4's.
CDNA4_ONLY = frozenset(
    {
        *("v_maximum3_f32", "v_minimum3_f32", "v_pk_maximum3_f16", "v_pk_minimum3_f16", "v_bitop3_b16"),
        *("v_cvt_pk_f16_f32", "v_cvt_pk_bf16_f32", "v_cvt_f32_bf16", "v_dot2_f32_bf16"),
    }
)

_REGISTERS = 240  # that values may take; the rest are left to tests
_OTHER_NAMES = (
    ("_max_", "_max_num_"),
    ("_min_", "_min_num_"),
    ("_max3_", "_max3_num_"),
    ("_min3_", "_min3_num_"),
    ("_med3_", "_med3_num_"),
    ("_maxmin_", "_maxmin_num_"),
    ("_minmax_", "_minmax_num_"),
    ("_add_", "_add_nc_"),
    ("_sub_", "_sub_nc_"),
    ("_fma_mix", "_mad_mix"),
    ("_pkrtz_", "_pk_rtz_"),
    ("_pknorm_", "_pk_norm_"),
    ("_rpi_", "_nearest_"),
    ("_flr_", "_floor_"),
    ("_legacy_", "_dx9_zero_"),
)


def instruction(chip: str, name: str) -> Callable[..., Any]:
    """The encoder of an instruction, in its longest form, on a chip that may have another name for it.

    Raises LookupError if the chip has no such instruction.
    """
    names = [name, *(name.replace(old, new) for old, new in _OTHER_NAMES if old in name)]
    for each in names:
        for suffix in ("_e64", "", "_e32"):
            if encoder := getattr(MODULES[chip], each + suffix, None):
                found: Callable[..., Any] = encoder
                return found
    raise LookupError(f"{chip} has no {name}")


def available(names: Iterable[str], chips: Iterable[str] = ALL_CHIPS) -> list[tuple[str, str]]:
    """The chips and names of instructions that exist."""
    return [(chip, name) for name in names for chip in chips if _has_instruction(chip, name)]


def _has_instruction(chip: str, name: str) -> bool:
    # CDNA's tables are those of CDNA 4
    if chip == "gfx942" and name in CDNA4_ONLY:
        return False
    try:
        instruction(chip, name)
    except LookupError:
        return False
    return True


def run(chip: str, wave: Wave, *instructions: Any) -> None:
    """Runs encoded instructions, or bytes of code, to the end of the program."""
    code = [each if isinstance(each, bytes) else each.to_bytes() for each in instructions]
    wave.run(CHIPS[chip], b"".join([*code, MODULES[chip].s_endpgm().to_bytes()]))
    assert wave.status == 0


def with_row_mirror(encoded: Any, register: int) -> bytes:
    """A short form whose source 0 is, by DPP, that register's value in the mirrored lane of its row of 16."""
    first = int.from_bytes(encoded.to_bytes(), "little") & ~0x1FF | 0xFA
    return first.to_bytes(4, "little") + (register | 0x140 << 8 | 0xFF << 24).to_bytes(4, "little")


def f32(*values: float) -> npt.NDArray[np.float32]:
    return np.array(values, np.float32)


def u32(*values: int) -> npt.NDArray[np.uint32]:
    return np.array(values, np.uint32)


def full_wave(chip: str, mode: int = KEEP_DENORMALS) -> Wave:
    wave = Wave(mode=mode)
    wave.set_exec((1 << CHIPS[chip].lanes) - 1)
    return wave


def evaluate(
    chip: str,
    encode: Callable[..., Any],
    *sources: Bits,
    dtype: npt.DTypeLike = np.uint32,
    before: int = 0,
    mode: int = KEEP_DENORMALS,
    mask: Sequence[bool] | npt.NDArray[np.bool_] | None = None,
) -> Bits:
    """The results of the instruction that `encode(destination, *sources)` makes, one for each element.

    Sources are arrays of 8 bits or more of one length; 64-bit ones take two registers. `dtype` (uint32 or
    uint64) is the results'; `before` is what their registers hold. `mask` sets VCC's bit of each lane, for a
    single group of lanes.
    """
    arrays = [np.ascontiguousarray(each).view(f"u{each.itemsize}") for each in sources]
    words = [max(1, each.itemsize // 4) for each in arrays]
    result_words = np.dtype(dtype).itemsize // 4
    lanes = CHIPS[chip].lanes
    blocks = _REGISTERS // (sum(2 * ((each + 1) // 2) for each in [*words, result_words]))
    step = lanes if mask is not None else lanes * blocks
    parts = [
        _evaluate_blocks(
            chip, encode, [each[n : n + step] for each in arrays], words, result_words, before, mode, mask
        )
        for n in range(0, len(arrays[0]), step)
    ]
    return np.concatenate(parts).view(dtype)


def _evaluate_blocks(
    chip: str,
    encode: Callable[..., Any],
    sources: list[Bits],
    words: list[int],
    result_words: int,
    before: int,
    mode: int,
    mask: Sequence[bool] | npt.NDArray[np.bool_] | None,
) -> Bits:
    wave = full_wave(chip, mode)
    lanes = CHIPS[chip].lanes
    count = len(sources[0])
    if mask is not None:
        bits = sum(1 << lane for lane, is_set in enumerate(mask) if is_set)
        wave.s[VCC : VCC + 2] = bits & 0xFFFFFFFF, bits >> 32
    vgpr = MODULES[chip].v
    code, results, register = [], [], 0
    for first in range(0, count, lanes):
        operands = []
        for array, size in zip(sources, words, strict=True):
            _place(wave, register, array[first : first + lanes], size)
            operands.append(vgpr[register : register + size - 1] if size > 1 else vgpr[register])
            register += 2 * ((size + 1) // 2)
        wave.v[register : register + result_words] = before
        results.append(register)
        destination = vgpr[register : register + result_words - 1] if result_words > 1 else vgpr[register]
        code.append(encode(destination, *operands))
        register += 2 * ((result_words + 1) // 2)
    run(chip, wave, *code)
    found = [wave.v[each : each + result_words, :lanes].T.reshape(-1) for each in results]
    return np.concatenate(found)[: count * result_words].copy()


def _place(wave: Wave, register: int, values: Bits, size: int) -> None:
    if size == 1:
        wave.v[register, : len(values)] = values
    else:
        wave.v[register : register + size, : len(values)] = values.view(np.uint32).reshape(-1, size).T
