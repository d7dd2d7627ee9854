"""Tests of vector_bytes.c against Python's integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from emulated_gpu.chips import Chip
from emulated_gpu_tests.wave.operands import (
    CDNA,
    RDNA3,
    RDNA4,
    encoder,
    operands,
    random_operands,
    vector_results,
)

M32 = 0xFFFFFFFF
CHIPS = pytest.mark.parametrize("chip", [CDNA, RDNA3, RDNA4], ids=lambda chip: chip.name)


def parts(x: int, bits: int = 8, count: int = 4) -> list[int]:
    """From the lowest on."""
    return [x >> bits * n & ((1 << bits) - 1) for n in range(count)]


def word(of: Sequence[int]) -> int:
    return int.from_bytes(bytes(of), "little")


def permuted(a: int, b: int, selects: int) -> int:
    both = [*parts(b), *parts(a)]
    signs = [255 * (both[n] >> 7) for n in (1, 3, 5, 7)]
    values = dict(enumerate([*both, *signs, 0]))
    return word([values.get(select, 255) for select in parts(selects)])


def distances(a: int, b: int, bits: int = 8) -> int:
    return sum(
        abs(x - y) for x, y in zip(parts(a, bits, 32 // bits), parts(b, bits, 32 // bits), strict=True)
    )


def masked_distances(a: int, b: int) -> int:
    return sum(abs(x - y) for x, y in zip(parts(a), parts(b), strict=True) if y)


def averages(a: int, b: int, c: int) -> int:
    return word([(x + y + z % 2) // 2 for x, y, z in zip(parts(a), parts(b), parts(c), strict=True)])


EXACT: dict[str, Callable[[int, int, int], int]] = {
    "v_sad_u8": lambda a, b, c: distances(a, b) + c,
    "v_sad_hi_u8": lambda a, b, c: (distances(a, b) << 16) + c,
    "v_sad_u16": lambda a, b, c: distances(a, b, 16) + c,
    "v_sad_u32": lambda a, b, c: abs(a - b) + c,
    "v_msad_u8": lambda a, b, c: masked_distances(a, b) + c,
    "v_lerp_u8": averages,
}


@CHIPS
@pytest.mark.parametrize("clamp", [0, 1])
@pytest.mark.parametrize("name", EXACT)
def test_sums_and_averages(chip: Chip, name: str, clamp: int) -> None:
    values = operands([32, 32, 32], seed=1)
    make = encoder(chip, name)
    results = vector_results(chip, lambda *r: make(*r, clmp=clamp), values, [32, 32, 32])
    exact = [EXACT[name](*each) for each in values]
    assert results == [min(x, M32) if clamp else x & M32 for x in exact]


@CHIPS
def test_bytes_are_selected(chip: Chip) -> None:
    words = random_operands([32, 32], 2, 200)
    selects = [word([n % 17, (n + 5) % 13, (3 * n) % 256, 255 - n]) for n in range(200)]
    values = [(a, b, select) for (a, b), select in zip(words, selects, strict=True)]
    values += [(0x80FF7F00, 0x00807FFF, word([n, n, 12, 13])) for n in range(8, 12)]
    assert vector_results(chip, encoder(chip, "v_perm_b32"), values, [32] * 3) == [
        permuted(*x) for x in values
    ]


@CHIPS
@pytest.mark.parametrize("clamp", [0, 1])
def test_sums_slide_over_bytes(chip: Chip, clamp: int) -> None:
    values = operands([64, 32, 64], seed=3)
    for name, reference in (("v_qsad_pk_u16_u8", distances), ("v_mqsad_pk_u16_u8", masked_distances)):
        make = encoder(chip, name)
        results = vector_results(chip, lambda *r, m=make: m(*r, clmp=clamp), values, [64, 32, 64], 64)
        for (a, b, c), result in zip(values, results, strict=True):
            sums = [reference(a >> 8 * n & M32, b) + parts(c, 16)[n] for n in range(4)]
            assert parts(result, 16) == [min(x, 0xFFFF) if clamp else x & 0xFFFF for x in sums]
