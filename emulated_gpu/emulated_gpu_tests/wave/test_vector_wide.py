"""Tests of vector_wide.c against Python's integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tinygrad.renderer.amd.dsl import v

from emulated_gpu.chips import Chip
from emulated_gpu_tests.wave.operands import (
    CDNA,
    RDNA3,
    RDNA4,
    carrying_results,
    elements,
    encoder,
    isa,
    operands,
    random_operands,
    run,
    signed,
    vector_results,
)
from emulated_gpu_tests.wave.single_wave import Wave

M64 = (1 << 64) - 1
SHIFTS: dict[str, Callable[[int, int], int]] = {
    "v_lshlrev_b64": lambda a, b: b << a % 64,
    "v_lshrrev_b64": lambda a, b: b >> a % 64,
    "v_ashrrev_i64": lambda a, b: signed(b, 64) >> a % 64,
}
CHIPS = pytest.mark.parametrize("chip", [CDNA, RDNA3, RDNA4], ids=lambda chip: chip.name)


@CHIPS
def test_shifts(chip: Chip) -> None:
    values = operands([32, 64], seed=1)
    for name, reference in SHIFTS.items():
        results = vector_results(chip, encoder(chip, name), values, [32, 64], 64)
        assert results == [reference(*each) & M64 for each in values], name


def test_moves() -> None:
    values = operands([64], seed=2)
    results = vector_results(CDNA, encoder(CDNA, "v_mov_b64"), values, [64], 64)
    assert results == [a for (a,) in values]


def test_a_shifted_number_is_added() -> None:
    values = [(a, b % 8, c) for a, b, c in operands([64, 32, 64], seed=3)]
    results = vector_results(CDNA, encoder(CDNA, "v_lshl_add_u64"), values, [64, 32, 64], 64)
    assert results == [(a << b) + c & M64 for a, b, c in values]


@CHIPS
@pytest.mark.parametrize("clamp", [0, 1])
@pytest.mark.parametrize("is_signed", [False, True])
def test_products_are_added_with_a_carry(chip: Chip, clamp: int, is_signed: bool) -> None:
    values = operands([32, 32, 64], seed=4)
    number = signed if is_signed else lambda x, bits=32: x
    names = ("v_mad_i64_i32", "v_mad_co_i64_i32") if is_signed else ("v_mad_u64_u32", "v_mad_co_u64_u32")
    low, high = (-(1 << 63), (1 << 63) - 1) if is_signed else (0, M64)
    make = encoder(chip, *names)

    def encode(dst: Any, sources: list[Any], _carry_in: Any, carry_out: Any) -> Any:
        return make(dst, carry_out, *sources, clmp=clamp)

    exact = [number(a) * number(b) + number(c, 64) for a, b, c in values]
    expected = [((max(low, min(high, x)) if clamp else x) & M64, x >> 64 & 1) for x in exact]
    assert carrying_results(chip, encode, values, [32, 32, 64], 64) == expected


def test_dpp_moves_both_words() -> None:
    names, wave = isa(CDNA), Wave()
    wave.set_exec(M64)
    values = [a for (a,) in random_operands([64], 5, 64)]
    for part in range(2):
        wave.v[part] = [value >> 32 * part & 0xFFFFFFFF for value in values]
    row_newbcast_3 = names.VOP1_DPP16(
        op=names.VOP1Op.V_MOV_B64_E32,
        vdst=v[2:3],
        src0=names.DPP16,
        vsrc0=v[0:1],
        dpp=0x153,
        row_mask=15,
        bank_mask=15,
    )
    run(CDNA, wave, [row_newbcast_3])
    assert elements(wave, 2, 64) == [values[lane & ~15 | 3] for lane in range(64)]


def test_an_undefined_upper_word_leaves_the_lower_one_defined() -> None:
    wave = Wave()
    wave.set_exec(M64)
    wave.v_defined[0], wave.v_defined[1] = M64 ^ 1, M64 ^ 2
    run(CDNA, wave, [encoder(CDNA, "v_lshlrev_b64")(v[2:3], 1, v[0:1])])
    assert [int(lanes) for lanes in wave.v_defined[2:4]] == [M64 ^ 1, M64 ^ 3]
