"""Packed operations: each half or word against exact arithmetic and Python's integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from emulated_gpu_tests.wave import exact
from emulated_gpu_tests.wave.evaluation import (
    IEEE,
    MODULES,
    available,
    evaluate,
    f32,
    full_wave,
    instruction,
    run,
)
from emulated_gpu_tests.wave.exact import F16, F32, NAN, assert_same, chosen, extremes, samples
from emulated_gpu_tests.wave.single_wave import KEEP_DENORMALS
from emulated_gpu_tests.wave.test_vector_integer16 import OPERATIONS, ROWS

CHIPS = ("gfx942", "gfx950", "gfx1100", "gfx1201")
HALVES = samples(F16, 1500, seed=15)
WORDS = samples(F32, 1000, seed=16)
ONE = 0x3C00
ALL_HIGH = {"opsel_hi": 3, "opsel_hi2": 1}

Result = Callable[[int, int, int], int]


def _pairs(rows: npt.NDArray[np.unsignedinteger]) -> list[npt.NDArray[np.uint32]]:
    """Each column as low halves, and the same rotated by 17 rows as high ones."""
    return [column.astype(np.uint32) | np.roll(column, 17).astype(np.uint32) << 16 for column in rows.T]


def _as(kind: type[np.floating[Any]], function: Callable[..., npt.NDArray[np.floating[Any]]]) -> Result:
    """The function of numbers of a kind, on their bits."""
    unsigned = np.dtype(f"u{np.dtype(kind).itemsize}")

    def result(*bits: int) -> int:
        values = np.array(bits, unsigned).view(kind)
        with np.errstate(all="ignore"):
            return int(np.asarray(function(*values), kind).view(unsigned))

    return result


FLOATS: dict[str, tuple[int, Result]] = {
    "v_pk_add_f16": (2, _as(np.float16, lambda a, b, c: a + b)),
    "v_pk_mul_f16": (2, _as(np.float16, lambda a, b, c: a * b)),
    "v_pk_fma_f16": (3, lambda *bits: exact.fma(F16, *bits)),
    **{
        f"v_pk_{name}_f16": extremes(F16)[name]
        for name in ("max", "min", "maximum", "minimum", "maximum3", "minimum3")
    },
}
INTEGERS = {
    f"v_pk_{name}": OPERATIONS[f"v_{name}"]
    for name in (
        *("add_u16", "sub_u16", "mul_lo_u16", "mad_u16", "max_u16", "min_u16", "lshlrev_b16", "lshrrev_b16"),
        *("add_i16", "sub_i16", "mad_i16", "max_i16", "min_i16", "ashrrev_i16"),
    )
}


@pytest.mark.parametrize(("chip", "name"), available(FLOATS, CHIPS))
def test_halves_of_floats(chip: str, name: str) -> None:
    num_sources, expected = FLOATS[name]
    encode = instruction(chip, name)
    found = evaluate(chip, lambda *args: encode(*args, **ALL_HIGH), *_pairs(HALVES)[:num_sources])
    wanted = [expected(*row) for row in HALVES.tolist()]
    assert_same(found & 0xFFFF, wanted, F16, chip, name)
    assert_same(np.roll(found >> 16, -17), wanted, F16, chip, name)


def _integers(name: str, *, clamps: bool = False) -> list[int]:
    operation = INTEGERS[name]
    least, most = (-0x8000, 0x7FFF) if operation.is_signed else (0, 0xFFFF)
    rows = ROWS.view(np.int16).tolist() if operation.is_signed else ROWS.tolist()
    results = [operation.result(*row) for row in rows]
    return [(max(least, min(most, each)) if clamps else each) & 0xFFFF for each in results]


@pytest.mark.parametrize("clamps", [False, True])
@pytest.mark.parametrize(("chip", "name"), available(INTEGERS, ("gfx942", "gfx1100")))
def test_halves_of_integers(chip: str, name: str, clamps: bool) -> None:
    encode = instruction(chip, name)
    sources = _pairs(ROWS)[: INTEGERS[name].num_sources]
    found = evaluate(chip, lambda *args: encode(*args, clmp=int(clamps), **ALL_HIGH), *sources)
    expected = _integers(name, clamps=clamps)
    assert (found & 0xFFFF).tolist() == expected
    assert np.roll(found >> 16, -17).tolist() == expected


@pytest.mark.parametrize("chip", ["gfx942", "gfx1100"])
@pytest.mark.parametrize("opsel", range(8))
@pytest.mark.parametrize("opsel_hi", [0, 5, 7])
def test_each_result_picks_halves_and_signs(chip: str, opsel: int, opsel_hi: int) -> None:
    encode = instruction(chip, "v_pk_fma_f16")
    rows = HALVES[::9]
    sources = _pairs(rows)
    neg, neg_hi = opsel ^ 5, opsel_hi ^ 2
    modifiers = {
        "opsel": opsel,
        "opsel_hi": opsel_hi & 3,
        "opsel_hi2": opsel_hi >> 2,
        "neg": neg,
        "neg_hi": neg_hi,
    }
    found = evaluate(chip, lambda *args: encode(*args, **modifiers), *sources)
    for shift, halves, signs in ((0, opsel, neg), (16, opsel_hi, neg_hi)):
        picked = [
            [
                int(each) >> 16 * (halves >> n & 1) & 0xFFFF ^ (signs >> n & 1) << 15
                for n, each in enumerate(row)
            ]
            for row in zip(*sources, strict=True)
        ]
        assert_same(found >> shift & 0xFFFF, [exact.fma(F16, *row) for row in picked], F16)


def test_integers_pick_halves() -> None:
    encode = instruction("gfx942", "v_pk_sub_i16")
    a, b = np.array([0x00070005], np.uint32), np.array([0x00010002], np.uint32)
    found = evaluate("gfx942", lambda *args: encode(*args, opsel=1, opsel_hi=2), a, b)
    assert found.tolist() == [(5 - 1) << 16 | (7 - 2)]


def test_clamped_and_flushed_halves() -> None:
    encode = instruction("gfx942", "v_pk_mul_f16")
    values, ones = np.array([0xC0004000, 0x02003800], np.uint32), np.full(2, ONE | ONE << 16, np.uint32)
    found = evaluate("gfx942", lambda *args: encode(*args, clmp=1, opsel_hi=3), values, ones)
    assert found.tolist() == [0x00003C00, 0x02003800]
    for mode in (0x40, 0x80, 0):
        found = evaluate("gfx942", lambda *args: encode(*args, opsel_hi=3), values, ones, mode=mode)
        assert found.tolist() == [0xC0004000, 0x00003800]
    low = np.array([0x38000200], np.uint32)
    found = evaluate("gfx942", lambda *args: encode(*args, opsel_hi=3), low, ones[:1], mode=0x80)
    assert found.tolist() == [0x38000000]


def test_extremes_keep_signalling_nans_in_ieee_mode() -> None:
    encode = instruction("gfx942", "v_pk_max_f16")
    found = evaluate(
        "gfx942", lambda *args: encode(*args, opsel_hi=3), *_pairs(HALVES)[:2], mode=KEEP_DENORMALS | IEEE
    )
    expected = [
        NAN if any(F16.is_nan(each) and not each & 0x200 for each in (a, b)) else chosen(F16, max, a, b)
        for a, b, _ in HALVES.tolist()
    ]
    assert_same(found & 0xFFFF, expected, F16)


@pytest.mark.parametrize("chip", ["gfx942", "gfx1100"])
def test_pack_keeps_bits_but_for_signs(chip: str) -> None:
    encode = instruction(chip, "v_pack_b32_f16")
    every = np.arange(0x10000, dtype=np.uint32)
    found = evaluate(
        chip, lambda *args: encode(*args, opsel=1, neg=2), every << 16 | 0x1111, every | 0x22220000
    )
    assert (found == (every | (every ^ 0x8000) << 16)).all()


# ---- words of 64 bits


def _wide(rows: npt.NDArray[np.unsignedinteger]) -> list[npt.NDArray[np.uint64]]:
    return [
        column.astype(np.uint64) | np.roll(column, 5).astype(np.uint64) << np.uint64(32) for column in rows.T
    ]


PAIRS_OF_WORDS: dict[str, tuple[int, Result]] = {
    "v_pk_add_f32": (2, _as(np.float32, lambda a, b, c: a + b)),
    "v_pk_mul_f32": (2, _as(np.float32, lambda a, b, c: a * b)),
    "v_pk_fma_f32": (3, lambda *bits: exact.fma(F32, *bits)),
}


@pytest.mark.parametrize("name", PAIRS_OF_WORDS)
@pytest.mark.parametrize(("opsel", "opsel_hi", "neg", "neg_hi"), [(0, 7, 0, 0), (5, 2, 3, 4), (2, 4, 4, 1)])
def test_each_word_picks_words_and_signs(name: str, opsel: int, opsel_hi: int, neg: int, neg_hi: int) -> None:
    num_sources, expected = PAIRS_OF_WORDS[name]
    encode, sources = instruction("gfx942", name), _wide(WORDS)
    modifiers = {
        "opsel": opsel,
        "opsel_hi": opsel_hi & 3,
        "opsel_hi2": opsel_hi >> 2,
        "neg": neg,
        "neg_hi": neg_hi,
    }
    found = evaluate(
        "gfx942", lambda *args: encode(*args, **modifiers), *sources[:num_sources], dtype=np.uint64
    )
    for part, words, signs in ((0, opsel, neg), (1, opsel_hi, neg_hi)):
        wanted = [
            expected(
                *(
                    int(each) >> 32 * (words >> n & 1) & 0xFFFFFFFF ^ (signs >> n & 1) << 31
                    for n, each in enumerate(row)
                )
            )
            for row in zip(*sources, strict=True)
        ]
        assert_same(found >> np.uint64(32 * part) & np.uint64(0xFFFFFFFF), wanted, F32, name)


def test_words_of_scalars_constants_and_overlapping_registers() -> None:
    module = MODULES["gfx942"]
    wave = full_wave("gfx942")
    wave.s[4:6] = f32(2, 3).view(np.uint32)
    wave.v[0], wave.v[1] = (np.full(64, each, np.float32).view(np.uint32) for each in (5, 7))
    run(
        "gfx942",
        wave,
        module.v_pk_mul_f32(module.v[2:3], module.v[0:1], module.s[4:5], opsel_hi=3),
        module.v_pk_add_f32(module.v[4:5], module.v[0:1], 1.0, opsel_hi=3),
        module.v_pk_add_f32(module.v[0:1], module.v[0:1], module.v[0:1], opsel=1, opsel_hi=2),
    )
    assert wave.v[2:6, 0].view(np.float32).tolist() == [10, 21, 6, 8]
    assert wave.v[0:2, 0].view(np.float32).tolist() == [12, 12]


@pytest.mark.parametrize(("opsel", "expected"), [(0, (1, 3)), (1, (2, 3)), (2, (1, 4)), (3, (2, 4))])
def test_move_takes_a_word_of_each_source(opsel: int, expected: tuple[int, int]) -> None:
    module = MODULES["gfx942"]
    wave = full_wave("gfx942")
    wave.v[0:4, :] = np.array([[1], [2], [3], [4]])
    run("gfx942", wave, module.v_pk_mov_b32(module.v[0:1], module.v[0:1], module.v[2:3], opsel=opsel))
    assert tuple(wave.v[0:2, 0].tolist()) == expected


def test_only_the_words_that_are_read_need_be_defined() -> None:
    module = MODULES["gfx942"]
    wave = full_wave("gfx942")
    wave.s_defined[5] = 0
    wave.v_defined[1] = 0
    run(
        "gfx942",
        wave,
        module.v_pk_mul_f32(module.v[2:3], module.v[6:7], module.s[4:5], opsel_hi=1),
        module.v_pk_add_f32(module.v[4:5], module.v[0:1], module.v[6:7], opsel_hi=3),
        module.v_pk_mov_b32(module.v[8:9], module.v[0:1], module.v[0:1], opsel=2),
    )
    defined = [bool(each) for each in wave.v_defined[[2, 3, 4, 5, 8, 9]]]
    assert defined == [True, True, True, False, True, False]


@pytest.mark.parametrize(("mode", "expected"), [(0xF0, 0x00400000), (0xD0, 0), (0xE0, 0)])
def test_denormal_words_are_kept_or_flushed(mode: int, expected: int) -> None:
    encode = instruction("gfx942", "v_pk_mul_f32")
    denormals, ones = np.array([0x0040000000400000], np.uint64), np.array([0x3F8000003F800000], np.uint64)
    found = evaluate(
        "gfx942", lambda *args: encode(*args, opsel_hi=3), denormals, ones, dtype=np.uint64, mode=mode
    )
    assert found.tolist() == [expected << 32 | expected]
