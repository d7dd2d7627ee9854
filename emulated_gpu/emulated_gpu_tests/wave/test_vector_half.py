"""Operations on f16, and those that mix it with f32, against exact arithmetic and numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulated_gpu_tests.wave import exact
from emulated_gpu_tests.wave.evaluation import (
    ALL_CHIPS,
    IEEE,
    MODULES,
    available,
    evaluate,
    full_wave,
    instruction,
    run,
    u32,
    with_row_mirror,
)
from emulated_gpu_tests.wave.exact import F16, F32, NAN, assert_same, chosen, extremes, samples
from emulated_gpu_tests.wave.single_wave import KEEP_DENORMALS

CHIPS = ("gfx942", "gfx1100", "gfx1201")
SAMPLES = samples(F16, 1500, seed=5)
A, B, C = (SAMPLES[:, n].copy() for n in range(3))
X, Y = A.view(np.float16), B.view(np.float16)
EVERY = np.arange(0x10000, dtype=np.uint16)
OLD = 0xABCD1234

Function = Callable[..., npt.NDArray[np.float16]]


def _bits(values: npt.ArrayLike) -> list[int]:
    return [int(each) for each in np.asarray(values, np.float16).view(np.uint16)]


def _low(found: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.unsignedinteger]:
    return found & np.uint32(0xFFFF)


@pytest.mark.parametrize("chip", ALL_CHIPS)
@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("v_add_f16", lambda a, b: a + b),
        ("v_sub_f16", lambda a, b: a - b),
        ("v_subrev_f16", lambda a, b: b - a),
        ("v_mul_f16", lambda a, b: a * b),
    ],
)
def test_sums_and_products_are_rounded_to_nearest_even(chip: str, name: str, reference: Function) -> None:
    found = evaluate(chip, instruction(chip, name), A, B)
    with np.errstate(all="ignore"):
        assert_same(_low(found), _bits(reference(X, Y)), F16, chip, name)


@pytest.mark.parametrize("chip", CHIPS)
def test_fma_rounds_once(chip: str) -> None:
    found = evaluate(chip, instruction(chip, "v_fma_f16"), A, B, C)
    assert_same(_low(found), [exact.fma(F16, *row) for row in SAMPLES.tolist()], F16)


@given(st.lists(st.tuples(*[st.integers(0, 2**16 - 1)] * 3), min_size=1, max_size=64))
@settings(max_examples=25, deadline=None)
def test_fma_rounds_once_whatever_the_bits(rows: list[tuple[int, int, int]]) -> None:
    a, b, c = np.array(rows, np.uint16).T
    found = evaluate("gfx942", instruction("gfx942", "v_fma_f16"), a, b, c)
    assert_same(_low(found), [exact.fma(F16, *row) for row in rows], F16)


def test_fma_sees_what_an_f32_would_lose() -> None:
    # 1.5 ulp of 2048 is a tie, which the smallest addend breaks
    rows = [(0x4401, 0x6401, c) for c in (0x0001, 0x8001, 0x0000)] + [
        (0x7BFF, 0x3C01, 0x0001),
        (0x0001, 0x0001, 0x3C00),
    ]
    a, b, c = np.array(rows, np.uint16).T
    found = evaluate("gfx942", instruction("gfx942", "v_fma_f16"), a, b, c)
    assert_same(_low(found), [exact.fma(F16, *row) for row in rows], F16)


EXTREMES = {f"v_{name}_f16": each for name, each in extremes(F16).items()}


@pytest.mark.parametrize(("chip", "name"), available(EXTREMES))
def test_extremes_order_zeros_and_drop_or_keep_nans(chip: str, name: str) -> None:
    num_sources, expected = EXTREMES[name]
    found = evaluate(chip, instruction(chip, name), *(A, B, C)[:num_sources])
    assert_same(_low(found), [expected(*row) for row in SAMPLES.tolist()], F16, chip, name)


def test_extremes_keep_signalling_nans_in_ieee_mode() -> None:
    found = evaluate("gfx942", instruction("gfx942", "v_min_f16"), A, B, mode=KEEP_DENORMALS | IEEE)
    signalling = [[F16.is_nan(each) and not each & 0x200 for each in row[:2]] for row in SAMPLES.tolist()]
    expected = [
        NAN if any(which) else chosen(F16, min, *row[:2])
        for which, row in zip(signalling, SAMPLES.tolist(), strict=True)
    ]
    assert_same(_low(found), expected, F16)


@pytest.mark.parametrize("chip", CHIPS)
def test_median_is_the_middle_one_or_the_least_number_beside_a_nan(chip: str) -> None:
    found = _low(evaluate(chip, instruction(chip, "v_med3_f16"), A, B, C))
    for got, row in zip(found.tolist(), SAMPLES.tolist(), strict=True):
        if any(map(F16.is_nan, row)):
            assert_same(np.array([got], np.uint32), [chosen(F16, min, *row)], F16, row)
        else:
            assert F16.number(got) == sorted(map(F16.number, row))[1], row


@pytest.mark.parametrize("chip", ["gfx942", "gfx1100"])
@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("v_trunc_f16", np.trunc),
        ("v_ceil_f16", np.ceil),
        ("v_floor_f16", np.floor),
        ("v_rndne_f16", np.rint),
        (
            "v_fract_f16",
            lambda x: np.minimum(x - np.floor(x), np.where(np.isfinite(x), np.float16(1 - 2**-11), np.nan)),
        ),
        ("v_frexp_mant_f16", lambda x: np.frexp(x)[0]),
    ],
)
def test_every_value_of_exact_functions(chip: str, name: str, reference: Function) -> None:
    found = evaluate(chip, instruction(chip, name), EVERY)
    with np.errstate(all="ignore"):
        assert_same(_low(found), _bits(reference(EVERY.view(np.float16))), F16, name)


@pytest.mark.parametrize("chip", ["gfx942", "gfx1100"])
@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("v_rcp_f16", lambda x: 1 / x),
        ("v_rsq_f16", lambda x: 1 / np.sqrt(x)),
        ("v_sqrt_f16", np.sqrt),
        ("v_exp_f16", np.exp2),
        ("v_log_f16", np.log2),
    ],
)
def test_every_value_of_approximations(
    chip: str, name: str, reference: Callable[..., npt.NDArray[np.float64]]
) -> None:
    found = _low(evaluate(chip, instruction(chip, name), EVERY)).astype(np.uint16)
    values = EVERY.view(np.float16).astype(np.float64)
    with np.errstate(all="ignore"):
        expected = reference(values).astype(np.float16)
    special = ~np.isfinite(expected)
    assert_same(found[special], _bits(expected[special]), F16, name)
    assert np.all(np.abs(found[~special].astype(int) - expected[~special].view(np.uint16).astype(int)) <= 1)


@pytest.mark.parametrize("chip", ["gfx942", "gfx1100"])
@pytest.mark.parametrize(("name", "function"), [("v_sin_f16", math.sin), ("v_cos_f16", math.cos)])
def test_sine_and_cosine_of_turns(chip: str, name: str, function: Callable[[float], float]) -> None:
    values = np.concatenate([np.linspace(-3, 3, 301), [255.25, -256, 300, 1e-3]]).astype(np.float16)
    found = _low(evaluate(chip, instruction(chip, name), values)).astype(np.uint16).view(np.float16)
    for got, turns in zip(found.tolist(), values.tolist(), strict=True):
        expected = function(2 * math.pi * math.fmod(turns, 1))
        if chip == "gfx942" and abs(turns) > 256:
            expected = 0 if function is math.sin else 1
        assert got == pytest.approx(expected, rel=2**-10, abs=1e-6), turns


@pytest.mark.parametrize("chip", ["gfx942", "gfx1100"])
def test_frexp_and_ldexp(chip: str) -> None:
    exponents = evaluate(chip, instruction(chip, "v_frexp_exp_i16_f16"), EVERY)
    values = EVERY.view(np.float16)
    with np.errstate(all="ignore"):
        expected = np.where(np.isfinite(values), np.frexp(values)[1], 0)
    assert (_low(exponents).astype(np.uint16).view(np.int16) == expected).all()
    by = np.random.default_rng(6).integers(-50, 50, len(A)).astype(np.int16)
    by[:4] = 32767, -32768, 40, -40
    found = evaluate(chip, instruction(chip, "v_ldexp_f16"), A, by)
    scaled = [
        F16.encode(
            F16.decode(bits) * Fraction(2) ** max(-80, min(80, n)), zero_is_negative=bool(bits & F16.sign)
        )
        if F16.is_finite(bits)
        else bits
        for bits, n in zip(A.tolist(), by.tolist(), strict=True)
    ]
    assert_same(_low(found), scaled, F16)


def test_division_fixup_puts_special_values_in_place() -> None:
    approximations = np.full(len(A), 0x3555, np.uint16)
    found = evaluate("gfx942", instruction("gfx942", "v_div_fixup_f16"), approximations, B, A)
    with np.errstate(all="ignore"):
        quotients = X.astype(np.float64) / Y.astype(np.float64)
    ordinary = np.isfinite(X) & np.isfinite(Y) & (X != 0) & (Y != 0)
    expected = np.where(ordinary, np.copysign(np.uint16(0x3555).view(np.float16), quotients), quotients)
    assert_same(_low(found), _bits(expected.astype(np.float16)), F16)


# ---- halves of registers


@pytest.mark.parametrize(
    ("chip", "name", "upper"),
    [
        ("gfx942", "v_add_f16", 0),  # zeroes the other half
        ("gfx942", "v_rcp_f16", 0),
        ("gfx942", "v_ldexp_f16", 0),
        ("gfx942", "v_frexp_exp_i16_f16", 0),
        ("gfx942", "v_fma_f16", 0xABCD),
        ("gfx1100", "v_add_f16", 0xABCD),
        ("gfx1100", "v_rcp_f16", 0xABCD),
        ("gfx1201", "v_fma_f16", 0xABCD),
    ],
)
def test_the_other_half_is_kept_or_zeroed(chip: str, name: str, upper: int) -> None:
    num_sources = {"v_add_f16": 2, "v_ldexp_f16": 2, "v_fma_f16": 3}.get(name, 1)
    found = evaluate(chip, instruction(chip, name), *[A] * num_sources, before=OLD)
    assert set((found >> 16).tolist()) == {upper}


@pytest.mark.parametrize("chip", ["gfx942", "gfx1100"])
def test_opsel_picks_halves_of_sources_and_destination(chip: str) -> None:
    encode = instruction(chip, "v_fma_f16")
    a = A.astype(np.uint32) << 16 | 0x7BFF
    b = B.astype(np.uint32) | 0x7BFF0000
    found = evaluate(chip, lambda *args: encode(*args, opsel=0b1001), a, b, C.astype(np.uint32), before=OLD)
    assert_same(found >> 16, [exact.fma(F16, *row) for row in SAMPLES.tolist()], F16)
    assert set(_low(found).tolist()) == {OLD & 0xFFFF}


def test_short_forms_name_upper_halves_by_register_numbers() -> None:
    module = MODULES["gfx1100"]
    wave = full_wave("gfx1100")
    wave.v[0], wave.v[1], wave.v[2] = 0x3C004000, 0x44004200, OLD
    # v2.h = v0.h + v1.l: registers 128 to 255 of the encoding are upper halves
    run("gfx1100", wave, module.v_add_f16_e32(module.v[130], module.v[128], module.v[1]))
    assert wave.v[2, 0] == 0x44001234


def test_modifiers() -> None:
    encode = instruction("gfx942", "v_mul_f16")
    values = np.array([-1.5, 0.25, 3], np.float16)
    found = evaluate("gfx942", lambda *args: encode(*args, abs=1, neg=2), values, values)
    assert _low(found).tolist() == _bits(np.abs(values) * -values)
    clamped = evaluate("gfx942", lambda *args: encode(*args, clmp=1), values, np.array([1, 1, 1], np.float16))
    assert _low(clamped).tolist() == _bits([0, 0.25, 1])
    doubled = evaluate(
        "gfx942", lambda *args: encode(*args, omod=1), values, np.array([1, 1, 1], np.float16), mode=0
    )
    assert _low(doubled).tolist() == _bits(2 * values)


@pytest.mark.parametrize(("mode", "expected"), [(0xC0, 0x0200), (0x40, 0), (0x80, 0), (0, 0)])
def test_denormals_are_kept_or_flushed_as_the_mode_says(mode: int, expected: int) -> None:
    one = np.array([0x3C00], np.uint16)
    found = evaluate(
        "gfx942", instruction("gfx942", "v_mul_f16"), np.array([0x0200], np.uint16), one, mode=mode
    )
    assert _low(found).tolist() == [expected]


# ---- f16 mixed with f32


MIXED = np.random.default_rng(7).integers(0, 2**32, (600, 3), np.uint64).astype(np.uint32)
MIXED[300:] = (MIXED[300:] & 0x83FF83FF) | 0x3C003C00  # ordinary numbers


def _mixed_value(bits: int, is_half: int, is_high: int) -> float:
    return F16.number(bits >> 16 * is_high & 0xFFFF) if is_half else F32.number(bits)


def _rounded(bits: int) -> float:
    return math.nan if bits == NAN else F32.number(bits)


def _mix(row: list[int], opsel_hi: int, opsel: int) -> int:
    """As an f32, of sources that f32 represents."""
    values = [_mixed_value(bits, opsel_hi >> n & 1, opsel >> n & 1) for n, bits in enumerate(row)]
    as_f32 = [int(np.array(value, np.float32).view(np.uint32)) for value in values]
    return exact.fma(F32, *as_f32)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("opsel_hi", "opsel"), [(0, 0), (7, 0), (7, 7), (5, 1), (2, 2), (3, 6)])
def test_mixed_fma_takes_halves_or_words(chip: str, opsel_hi: int, opsel: int) -> None:
    encode = instruction(chip, "v_fma_mix_f32")
    modifiers = {"opsel": opsel, "opsel_hi": opsel_hi & 3, "opsel_hi2": opsel_hi >> 2}
    found = evaluate(chip, lambda *args: encode(*args, **modifiers), *MIXED.T)
    assert_same(found, [_mix(row, opsel_hi, opsel) for row in MIXED.tolist()], F32)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("half", ["lo", "hi"])
def test_mixed_fma_rounds_to_f32_and_then_to_a_half(chip: str, half: str) -> None:
    encode = instruction(chip, f"v_fma_mix{half}_f16")
    found = evaluate(chip, lambda *args: encode(*args, opsel_hi=3, opsel_hi2=0), *MIXED.T, before=OLD)
    with np.errstate(all="ignore"):
        expected = _bits(np.array([_rounded(_mix(row, 3, 0)) for row in MIXED.tolist()], np.float32))
    shift = 16 if half == "hi" else 0
    assert_same(found >> shift & np.uint32(0xFFFF), expected, F16)
    assert set((found >> (16 - shift) & 0xFFFF).tolist()) == {OLD >> (16 - shift) & 0xFFFF}


def test_mixed_fma_negates_and_takes_absolute_values() -> None:
    encode = instruction("gfx942", "v_fma_mix_f32")
    three, minus_two = 0x4200, 0xC000
    found = evaluate(
        "gfx942",
        lambda *args: encode(*args, opsel_hi=3, opsel_hi2=0, neg=1, neg_hi=2),
        *(u32(three), u32(minus_two), np.array([10], np.float32)),
    )
    assert found.view(np.float32).tolist() == [-3 * 2 + 10]


def test_reversed_subtraction_takes_the_subtrahend_from_other_lanes() -> None:
    module = MODULES["gfx942"]
    wave = full_wave("gfx942")
    wave.v[0] = np.arange(64).astype(np.float16).view(np.uint16)
    run("gfx942", wave, with_row_mirror(module.v_subrev_f16_e32(module.v[1], module.v[0], module.v[0]), 0))
    lanes = np.arange(64)
    assert wave.v[1].astype(np.uint16).view(np.float16).tolist() == (lanes - (lanes ^ 15)).tolist()
