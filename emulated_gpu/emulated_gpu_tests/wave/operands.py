"""Runs one instruction on many operands: elements of vectors, a lane each, or scalar registers."""

from __future__ import annotations

import importlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
from tinygrad.renderer.amd.dsl import s, v

from emulated_gpu.chips import CHIPS, Chip
from emulated_gpu_tests.wave.single_wave import Wave

CDNA, CDNA4, RDNA3, RDNA4 = (CHIPS[name] for name in ("gfx942", "gfx950", "gfx1100", "gfx1201"))
Instruction: TypeAlias = Any  # tinygrad's classes have no types
Register: TypeAlias = Any
_FOLDERS = {"gfx942": "cdna", "gfx950": "cdna", "gfx1100": "rdna3", "gfx1201": "rdna4"}
_NUM_VGPRS, _NUM_SGPRS = 256, 100

EDGES_32 = (
    0,
    1,
    2,
    31,
    32,
    0x7F,
    0x80,
    0xFFFF,
    0x8000,
    0x7FFFFF,
    0x800000,
    0xFFFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
)
EDGES_64 = (0, 1, 63, 64, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
EDGES_16 = (0, 1, 15, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF)


def isa(chip: Chip) -> ModuleType:
    """Tinygrad's instruction classes for a chip."""
    return importlib.import_module(f"tinygrad.runtime.autogen.amd.{_FOLDERS[chip.name]}.ins")


def encoder(chip: Chip, *names: str) -> Callable[..., Instruction]:
    """Encodes the instruction that has one of `names` on `chip`, in its long form if it has one."""
    for name in names:
        for suffix in ("_e64", "", "_e32"):
            if found := getattr(isa(chip), name + suffix, None):
                return found  # type: ignore[no-any-return]
    raise LookupError(f"{chip.name} has none of {names}")


def signed(x: int, bits: int = 32) -> int:
    """The two's complement value of the low bits."""
    x &= (1 << bits) - 1
    return x - (x >> (bits - 1) << bits)


def run(chip: Chip, wave: Wave, instructions: Iterable[Instruction]) -> None:
    """Runs instructions to their end in `wave`, which must be without findings that stop it."""
    wave.run(chip, encoded(chip, instructions))
    assert wave.status == 0


def encoded(chip: Chip, instructions: Iterable[Instruction]) -> bytes:
    """The machine code of instructions and the end of the wave."""
    return b"".join(instruction.to_bytes() for instruction in [*instructions, isa(chip).s_endpgm()])


def all_lanes(chip: Chip) -> int:
    return (1 << chip.lanes) - 1


def operands(
    widths: Sequence[int], seed: int, num_random: int = 600, *, fewer_edges: bool = False
) -> list[tuple[int, ...]]:
    """Operands of so many bits: edge values with edge values, then random ones of random magnitude."""
    edges = {16: EDGES_16, 32: EDGES_32, 64: EDGES_64}
    all_edges = len(widths) < 3 and not fewer_edges
    chosen = [edges[bits] if all_edges else edges[bits][::2] + edges[bits][-1:] for bits in widths]
    return [*itertools.product(*chosen), *random_operands(widths, seed, num_random)]


def random_operands(widths: Sequence[int], seed: int, count: int) -> Iterator[tuple[int, ...]]:
    rng = random.Random(seed)
    for _ in range(count):
        yield tuple(rng.getrandbits(bits) >> rng.choice((0, 0, 0, rng.randrange(bits))) for bits in widths)


def register(file: Any, first: int, bits: int) -> Register:
    """`s` or `v` from `first` on, as many as `bits` need."""
    return file[first] if bits <= 32 else file[first : first + (bits + 31) // 32 - 1]


@dataclass(frozen=True)
class Slots:
    """Where the operands of one instruction are: the numbers of registers."""

    sources: tuple[int, ...]
    result: int
    carry_in: int
    carry_out: int


def vector_results(
    chip: Chip,
    make: Callable[..., Instruction],
    values: Sequence[tuple[int, ...]],
    widths: Sequence[int],
    result_bits: int = 32,
    *,
    old: int = 0,
) -> list[int]:
    """The results of `make(destination, *sources)` for tuples of values, in a lane each.

    `old` is in the destination before.
    """
    return [
        result
        for result, _ in carrying_results(
            chip, lambda dst, sources, _in, _out: make(dst, *sources), values, widths, result_bits, old=old
        )
    ]


def carrying_results(
    chip: Chip,
    make: Callable[[Register, list[Register], Register, Register], Instruction],
    values: Sequence[tuple[int, ...]],
    widths: Sequence[int],
    result_bits: int = 32,
    *,
    carries: Sequence[int] = (),
    old: int = 0,
) -> list[tuple[int, int]]:
    """The results of `make(destination, sources, carry in, carry out)`, and the carries out."""
    dwords = [(bits + 31) // 32 for bits in (*widths, result_bits)]
    sets_a_run = min(_NUM_VGPRS // sum(dwords), 24) * chip.lanes
    results: list[tuple[int, int]] = []
    for start in range(0, len(values), sets_a_run):
        part = values[start : start + sets_a_run]
        results += _run_vectors(
            chip, make, part, widths, result_bits, carries[start : start + sets_a_run], old
        )
    return results


def _run_vectors(
    chip: Chip,
    make: Callable[[Register, list[Register], Register, Register], Instruction],
    values: Sequence[tuple[int, ...]],
    widths: Sequence[int],
    result_bits: int,
    carries: Sequence[int],
    old: int,
) -> list[tuple[int, int]]:
    wave = Wave()
    wave.set_exec(all_lanes(chip))
    groups = [values[n : n + chip.lanes] for n in range(0, len(values), chip.lanes)]
    slots = [_slots(number, [*widths, result_bits]) for number in range(len(groups))]
    for number, (slot, group) in enumerate(zip(slots, groups, strict=True)):
        for source, (first, bits) in enumerate(zip(slot.sources, widths, strict=True)):
            set_elements(wave, first, bits, [each[source] for each in group])
        set_elements(wave, slot.result, result_bits, [old] * len(group))
        mask = sum(carry << n for n, carry in enumerate(carries[number * chip.lanes :][: chip.lanes]))
        wave.s[slot.carry_in : slot.carry_in + 2] = mask & 0xFFFFFFFF, mask >> 32
    run(chip, wave, [_encode(chip, make, slot, widths, result_bits) for slot in slots])
    return [
        (element, int(wave.s[slot.carry_out + lane // 32]) >> lane % 32 & 1)
        for slot, group in zip(slots, groups, strict=True)
        for lane, element in enumerate(elements(wave, slot.result, result_bits)[: len(group)])
    ]


def _slots(number: int, widths: Sequence[int]) -> Slots:
    dwords = [(bits + 31) // 32 for bits in widths]
    starts = [number * sum(dwords) + sum(dwords[:n]) for n in range(len(dwords))]
    return Slots(tuple(starts[:-1]), starts[-1], 4 * number, 4 * number + 2)


def _encode(
    chip: Chip, make: Callable[..., Instruction], slot: Slots, widths: Sequence[int], result_bits: int
) -> Instruction:
    sources = [register(v, first, bits) for first, bits in zip(slot.sources, widths, strict=True)]
    carry_in, carry_out = (register(s, first, chip.lanes) for first in (slot.carry_in, slot.carry_out))
    return make(register(v, slot.result, result_bits), sources, carry_in, carry_out)


def set_elements(wave: Wave, first: int, bits: int, values: Sequence[int]) -> None:
    """Puts values into the first lanes of vector registers."""
    for part in range((bits + 31) // 32):
        wave.v[first + part, : len(values)] = [value >> 32 * part & 0xFFFFFFFF for value in values]


def elements(wave: Wave, first: int, bits: int) -> list[int]:
    """The values of all lanes of vector registers."""
    parts = [wave.v[first + part].astype(object) for part in range((bits + 31) // 32)]
    return [
        int(sum(word << 32 * part for part, word in enumerate(words))) for words in zip(*parts, strict=True)
    ]


def scalar_results(
    chip: Chip,
    make: Callable[..., Instruction],
    values: Sequence[tuple[int, ...]],
    widths: Sequence[int],
    result_bits: int = 32,
    *,
    sccs: Sequence[int] = (),
    old: int = 0,
) -> list[tuple[int, int]]:
    """The results of `make(destination, *sources)` for tuples in scalar registers, each with SCC after it.

    `sccs` are the values of SCC before (0 if not given), `old` is in the destination.
    """
    stride = 2 * (len(widths) + 2)  # two registers for SCC before and after, two for each operand
    a_run = _NUM_SGPRS // stride
    results: list[tuple[int, int]] = []
    for start in range(0, len(values), a_run):
        part, sccs_part = values[start : start + a_run], list(sccs[start : start + a_run]) or [0] * a_run
        results += _run_scalars(chip, make, part, widths, result_bits, stride, sccs_part, old)
    return results


def _run_scalars(
    chip: Chip,
    make: Callable[..., Instruction],
    values: Sequence[tuple[int, ...]],
    widths: Sequence[int],
    result_bits: int,
    stride: int,
    sccs: Sequence[int],
    old: int,
) -> list[tuple[int, int]]:
    names = isa(chip)
    wave = Wave()
    wave.set_exec(all_lanes(chip))
    instructions = []
    for number, each in enumerate(values):
        first = number * stride
        places = [first + 2 + 2 * n for n in range(len(widths) + 1)]
        for place, bits, value in zip(places, (*widths, result_bits), (*each, old), strict=True):
            set_scalar(wave, place, bits, value)
        wave.s[first] = sccs[number]
        registers = [
            register(s, place, bits) for place, bits in zip(places, (*widths, result_bits), strict=True)
        ]
        instructions += [
            names.s_cmp_lg_u32(s[first], 0),
            make(registers[-1], *registers[:-1]),
            names.s_cselect_b32(s[first + 1], 1, 0),
        ]
    run(chip, wave, instructions)
    last = 2 + 2 * len(widths)
    return [
        (scalar_value(wave, n * stride + last, result_bits), int(wave.s[n * stride + 1]))
        for n in range(len(values))
    ]


def set_scalar(wave: Wave, first: int, bits: int, value: int) -> None:
    """Puts a value into scalar registers."""
    for part in range((bits + 31) // 32):
        wave.s[first + part] = value >> 32 * part & 0xFFFFFFFF


def scalar_value(wave: Wave, first: int, bits: int) -> int:
    """The value in scalar registers."""
    return int(sum(int(wave.s[first + part]) << 32 * part for part in range((bits + 31) // 32)))


def float_of(bits: int, width: int) -> np.floating[Any]:
    """The float that has these bits."""
    kinds: dict[int, tuple[Any, Any]] = {
        16: (np.uint16, np.float16),
        32: (np.uint32, np.float32),
        64: (np.uint64, np.float64),
    }
    unsigned, kind = kinds[width]
    return np.array(bits, unsigned).view(kind)[()]  # type: ignore[no-any-return]
