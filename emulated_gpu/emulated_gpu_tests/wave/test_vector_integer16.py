"""Operations on 16-bit integers against Python's integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from emulated_gpu_tests.wave.evaluation import (
    MODULES,
    available,
    evaluate,
    full_wave,
    instruction,
    run,
    with_row_mirror,
)

EDGES = (0, 1, 2, 15, 16, 0x7F, 0x80, 0xFF, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF)
ROWS = np.concatenate(
    [
        np.array(
            [(a, b, EDGES[(5 * n) % len(EDGES)]) for n, a in enumerate(EDGES) for b in EDGES], np.uint16
        ),
        np.random.default_rng(8).integers(0, 2**16, (1000, 3)).astype(np.uint16),
    ]
)
OLD = 0xABCD1234


@dataclass(frozen=True)
class Operation:
    num_sources: int
    is_signed: bool
    result: Callable[[int, int, int], int]
    clears_upper_on_cdna: bool = True


def _signed(bits: int) -> int:
    return bits - 0x10000 if bits & 0x8000 else bits


OPERATIONS = {
    "v_add_u16": Operation(2, False, lambda a, b, c: a + b),
    "v_sub_u16": Operation(2, False, lambda a, b, c: a - b),
    "v_subrev_u16": Operation(2, False, lambda a, b, c: b - a),
    "v_mul_lo_u16": Operation(2, False, lambda a, b, c: a * b),
    "v_max_u16": Operation(2, False, lambda a, b, c: max(a, b)),
    "v_min_u16": Operation(2, False, lambda a, b, c: min(a, b)),
    "v_max_i16": Operation(2, True, lambda a, b, c: max(a, b)),
    "v_min_i16": Operation(2, True, lambda a, b, c: min(a, b)),
    "v_lshlrev_b16": Operation(2, False, lambda a, b, c: b << (a & 15) & 0xFFFF),
    "v_lshrrev_b16": Operation(2, False, lambda a, b, c: b >> (a & 15)),
    "v_ashrrev_i16": Operation(2, True, lambda a, b, c: b >> (a & 15)),
    "v_and_b16": Operation(2, False, lambda a, b, c: a & b, False),
    "v_or_b16": Operation(2, False, lambda a, b, c: a | b, False),
    "v_xor_b16": Operation(2, False, lambda a, b, c: a ^ b, False),
    "v_mov_b16": Operation(1, False, lambda a, b, c: a, False),
    "v_not_b16": Operation(1, False, lambda a, b, c: ~a, False),
    "v_add_i16": Operation(2, True, lambda a, b, c: a + b, False),
    "v_sub_i16": Operation(2, True, lambda a, b, c: a - b, False),
    "v_mad_u16": Operation(3, False, lambda a, b, c: a * b + c, False),
    "v_mad_i16": Operation(3, True, lambda a, b, c: a * b + c, False),
    "v_max3_u16": Operation(3, False, lambda a, b, c: max(a, b, c), False),
    "v_min3_u16": Operation(3, False, lambda a, b, c: min(a, b, c), False),
    "v_med3_u16": Operation(3, False, lambda a, b, c: sorted((a, b, c))[1], False),
    "v_max3_i16": Operation(3, True, lambda a, b, c: max(a, b, c), False),
    "v_min3_i16": Operation(3, True, lambda a, b, c: min(a, b, c), False),
    "v_med3_i16": Operation(3, True, lambda a, b, c: sorted((a, b, c))[1], False),
}
CLAMPED = ("v_add_u16", "v_sub_u16", "v_add_i16", "v_sub_i16", "v_mad_u16", "v_mad_i16")


def _expected(operation: Operation, *, clamps: bool = False) -> list[int]:
    least, most = (-0x8000, 0x7FFF) if operation.is_signed else (0, 0xFFFF)
    rows = [[_signed(each) if operation.is_signed else each for each in row] for row in ROWS.tolist()]
    results = [operation.result(a, b, c) for a, b, c in rows]
    return [(max(least, min(most, each)) if clamps else each) & 0xFFFF for each in results]


@pytest.mark.parametrize(("chip", "name"), available(OPERATIONS))
def test_results_wrap_and_the_other_half_is_kept_or_zeroed(chip: str, name: str) -> None:
    operation = OPERATIONS[name]
    found = evaluate(chip, instruction(chip, name), *ROWS.T[: operation.num_sources], before=OLD)
    assert (found & 0xFFFF).tolist() == _expected(operation)
    is_cleared = chip.startswith("gfx9") and operation.clears_upper_on_cdna
    assert set((found >> 16).tolist()) == {0 if is_cleared else OLD >> 16}


@pytest.mark.parametrize(("chip", "name"), available(CLAMPED, ("gfx942", "gfx1100")))
def test_clamped_results_saturate(chip: str, name: str) -> None:
    operation, encode = OPERATIONS[name], instruction(chip, name)
    found = evaluate(chip, lambda *args: encode(*args, clmp=1), *ROWS.T[: operation.num_sources])
    assert (found & 0xFFFF).tolist() == _expected(operation, clamps=True)


@pytest.mark.parametrize("chip", ["gfx942", "gfx1100"])
def test_opsel_picks_halves(chip: str) -> None:
    encode = instruction(chip, "v_mad_u16")
    a, b, c = ROWS.T.astype(np.uint32)
    found = evaluate(
        chip, lambda *args: encode(*args, opsel=0b1010), a | 0x55550000, b << 16 | 0x33, c, before=OLD
    )
    assert (found >> 16).tolist() == _expected(OPERATIONS["v_mad_u16"])
    assert set((found & 0xFFFF).tolist()) == {OLD & 0xFFFF}


@pytest.mark.parametrize("table", [0x00, 0x01, 0x80, 0x96, 0xE8, 0xCA, 0x12, 0x7F])
def test_bitop3_looks_bits_up_in_its_table(table: int) -> None:
    encode = instruction("gfx950", "v_bitop3_b16")
    modifiers = {"omod": table >> 6, "abs": table >> 3 & 7, "neg": table & 7}
    found = evaluate("gfx950", lambda *args: encode(*args, **modifiers), *ROWS.T)
    expected = [
        sum((table >> ((a >> n & 1) << 2 | (b >> n & 1) << 1 | c >> n & 1) & 1) << n for n in range(16))
        for a, b, c in ROWS.tolist()
    ]
    assert (found & 0xFFFF).tolist() == expected


@pytest.mark.parametrize(
    ("destination", "source", "expected"),
    [
        (0, 1, (0x1111_4444, 0x3333_2222)),
        (128, 1, (0x4444_2222, 0x3333_1111)),
        (0, 129, (0x1111_3333, 0x2222_4444)),
        (128, 129, (0x3333_2222, 0x1111_4444)),
    ],
)
def test_swap_exchanges_halves(destination: int, source: int, expected: tuple[int, int]) -> None:
    module = MODULES["gfx1100"]
    wave = full_wave("gfx1100")
    wave.v[0], wave.v[1] = 0x1111_2222, 0x3333_4444
    run("gfx1100", wave, module.v_swap_b16_e32(module.v[destination], module.v[source]))
    assert (wave.v[0, 0], wave.v[1, 0]) == expected


def test_reversed_subtraction_takes_the_subtrahend_from_other_lanes() -> None:
    module = MODULES["gfx942"]
    wave = full_wave("gfx942")
    wave.v[0] = np.arange(64)
    run("gfx942", wave, with_row_mirror(module.v_subrev_u16_e32(module.v[1], module.v[0], module.v[0]), 0))
    lanes = np.arange(64)
    assert wave.v[1].astype(np.uint16).view(np.int16).tolist() == (lanes - (lanes ^ 15)).tolist()
