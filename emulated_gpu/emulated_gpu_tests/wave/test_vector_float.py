"""Operations on f32 against exact arithmetic and numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

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
    f32,
    full_wave,
    instruction,
    run,
    u32,
    with_row_mirror,
)
from emulated_gpu_tests.wave.exact import F32, assert_same, chosen, extremes, samples
from emulated_gpu_tests.wave.single_wave import KEEP_DENORMALS, VCC

CHIPS = ("gfx942", "gfx1100", "gfx1201")
SAMPLES = samples(F32, 1200, seed=1)
A, B, C = (SAMPLES[:, n].copy() for n in range(3))
X, Y, Z = (each.view(np.float32) for each in (A, B, C))

Reference = Callable[[npt.NDArray[np.float32], npt.NDArray[np.float32]], npt.NDArray[np.float32]]


def _bits(values: npt.ArrayLike) -> list[int]:
    return [int(bits) for bits in np.asarray(values, np.float32).view(np.uint32)]


@pytest.mark.parametrize("chip", ALL_CHIPS)
@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("v_add_f32", lambda a, b: a + b),
        ("v_sub_f32", lambda a, b: a - b),
        ("v_subrev_f32", lambda a, b: b - a),
        ("v_mul_f32", lambda a, b: a * b),
        ("v_mul_legacy_f32", lambda a, b: np.where((a == 0) | (b == 0), np.float32(0), a * b)),
    ],
)
def test_sums_and_products_are_rounded_to_nearest_even(chip: str, name: str, reference: Reference) -> None:
    found = evaluate(chip, instruction(chip, name), A, B)
    with np.errstate(all="ignore"):
        assert_same(found, _bits(reference(X, Y)), F32, chip, name)


@pytest.mark.parametrize("chip", CHIPS)
def test_fma_rounds_once(chip: str) -> None:
    found = evaluate(chip, instruction(chip, "v_fma_f32"), A, B, C)
    assert_same(found, map(lambda *abc: exact.fma(F32, *abc), A.tolist(), B.tolist(), C.tolist()), F32)


@given(st.lists(st.tuples(*[st.integers(0, 2**32 - 1)] * 3), min_size=1, max_size=64))
@settings(max_examples=25, deadline=None)
def test_fma_rounds_once_whatever_the_bits(rows: list[tuple[int, int, int]]) -> None:
    a, b, c = np.array(rows, np.uint32).T
    found = evaluate("gfx942", instruction("gfx942", "v_fma_f32"), a, b, c)
    assert_same(found, [exact.fma(F32, *row) for row in rows], F32)


def test_mad_of_cdna2_rounds_twice_and_flushes_denormals() -> None:
    def mad(*operands: Any) -> bytes:
        """v_fma_f32 with another opcode (449 for 459), as tinygrad's tables lack v_mad_f32."""
        encoded = instruction("gfx90a", "v_fma_f32")(*operands).to_bytes()
        return bytes((int.from_bytes(encoded, "little") - (10 << 16)).to_bytes(8, "little"))

    found = evaluate("gfx90a", mad, A, B, C)
    with np.errstate(all="ignore"):
        x, y, z = (_flushed(each).astype(np.float32) for each in (X, Y, Z))
        product = _flushed(x * y).astype(np.float32)
        expected = _flushed(product + z).astype(np.float32)
    assert_same(found, _bits(expected), F32)


def test_legacy_fma_takes_zero_times_anything_as_zero() -> None:
    found = evaluate("gfx1100", instruction("gfx1100", "v_fma_legacy_f32"), A, B, C)
    expected = [
        exact.fma(F32, 0, 0, c) if 0 in (a & ~F32.sign, b & ~F32.sign) else exact.fma(F32, a, b, c)
        for a, b, c in SAMPLES.tolist()
    ]
    assert_same(found, expected, F32)


EXTREMES = {f"v_{name}_f32": each for name, each in extremes(F32).items()}


@pytest.mark.parametrize(("chip", "name"), available(EXTREMES))
def test_extremes_order_zeros_and_drop_or_keep_nans(chip: str, name: str) -> None:
    num_sources, expected = EXTREMES[name]
    found = evaluate(chip, instruction(chip, name), *(A, B, C)[:num_sources])
    assert_same(found, [expected(*row) for row in SAMPLES.tolist()], F32, chip, name)


@pytest.mark.parametrize("chip", ["gfx942", "gfx1100"])
@pytest.mark.parametrize("name", ["v_max_f32", "v_min_f32"])
def test_extremes_keep_signalling_nans_in_ieee_mode(chip: str, name: str) -> None:
    found = evaluate(chip, instruction(chip, name), A, B, mode=KEEP_DENORMALS | IEEE)
    pick = max if "max" in name else min
    expected = [
        exact.NAN if _is_signalling(a) or _is_signalling(b) else chosen(F32, pick, a, b)
        for a, b, _ in SAMPLES.tolist()
    ]
    assert_same(found, expected, F32)


def test_gfx12_has_no_ieee_mode() -> None:
    found = evaluate("gfx1201", instruction("gfx1201", "v_max_f32"), A, B, mode=KEEP_DENORMALS | IEEE)
    assert_same(found, [chosen(F32, max, a, b) for a, b, _ in SAMPLES.tolist()], F32)


def _is_signalling(bits: int) -> bool:
    return F32.is_nan(bits) and not bits & 0x00400000


@pytest.mark.parametrize("chip", CHIPS)
def test_median_is_the_middle_one_or_the_least_number_beside_a_nan(chip: str) -> None:
    found = evaluate(chip, instruction(chip, "v_med3_f32"), A, B, C)
    for got, row in zip(found.tolist(), SAMPLES.tolist(), strict=True):
        if any(map(F32.is_nan, row)):
            assert_same(np.array([got], np.uint32), [chosen(F32, min, *row)], F32, row)
        else:  # the manual's definition takes zeros as equal
            assert F32.number(got) == sorted(map(F32.number, row))[1], row


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("name", "reference"),
    [("v_trunc_f32", np.trunc), ("v_ceil_f32", np.ceil), ("v_floor_f32", np.floor), ("v_rndne_f32", np.rint)],
)
def test_roundings_to_integers(
    chip: str, name: str, reference: Callable[..., npt.NDArray[np.float32]]
) -> None:
    values = np.concatenate([X, np.arange(-8, 8, 0.25).astype(np.float32)])
    found = evaluate(chip, instruction(chip, name), values)
    with np.errstate(all="ignore"):
        assert_same(found, _bits(reference(values)), F32)


def test_fraction_is_below_one() -> None:
    found = evaluate("gfx942", instruction("gfx942", "v_fract_f32"), A)
    below_one = np.float32(1 - 2**-24)
    with np.errstate(all="ignore"):
        assert_same(found, _bits(np.fmin(X - np.floor(X), np.where(np.isfinite(X), below_one, np.nan))), F32)


# ---- approximations: hardware is within 1 ulp; so must these be


def _flushed(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    tiny = np.abs(values) < 2**-126
    return np.where(tiny, np.copysign(0, values), values).astype(np.float64)


def _assert_within_an_ulp(found: npt.NDArray[np.unsignedinteger], exact_: npt.NDArray[np.float64]) -> None:
    expected = exact_.astype(np.float32)
    expected = _flushed(expected).astype(np.float32)
    values = found.view(np.float32)
    special = ~np.isfinite(expected) | (expected == 0)
    assert_same(found[special], _bits(expected[special]), F32)
    assert np.all(np.abs(values[~special] - exact_[~special]) <= np.spacing(np.abs(expected[~special])))


APPROXIMATIONS: list[tuple[str, Callable[..., npt.NDArray[np.float64]]]] = [
    ("v_rcp_f32", lambda x: 1 / x),
    ("v_rcp_iflag_f32", lambda x: 1 / x),
    ("v_rsq_f32", lambda x: 1 / np.sqrt(x)),
    ("v_sqrt_f32", np.sqrt),
    ("v_exp_f32", np.exp2),
    ("v_log_f32", np.log2),
]


@pytest.mark.parametrize("chip", ["gfx942", "gfx1100"])
@pytest.mark.parametrize(("name", "reference"), APPROXIMATIONS)
def test_approximations_are_within_an_ulp_and_flush_denormals(
    chip: str, name: str, reference: Callable[..., npt.NDArray[np.float64]]
) -> None:
    values = np.concatenate(
        [X, np.linspace(-130, 130, 997, dtype=np.float32), f32(2**-126, 2**126, -(2**126))]
    )
    found = evaluate(chip, instruction(chip, name), values)
    with np.errstate(all="ignore"):
        _assert_within_an_ulp(found, reference(_flushed(values)))


@pytest.mark.parametrize(("name", "reference"), [each for each in APPROXIMATIONS if "iflag" not in each[0]])
def test_scalar_approximations(name: str, reference: Callable[..., npt.NDArray[np.float64]]) -> None:
    module = MODULES["gfx1201"]
    encode = getattr(module, name.replace("v_", "v_s_"))
    values = f32(2.5, 0.7, 3e-39, 0, math.inf, 200)
    wave = full_wave("gfx1201")
    wave.s[: len(values)] = values.view(np.uint32)
    run("gfx1201", wave, *(encode(module.s[16 + n], module.s[n]) for n in range(len(values))))
    with np.errstate(all="ignore"):
        _assert_within_an_ulp(wave.s[16 : 16 + len(values)], reference(_flushed(values)))


def test_scalar_approximations_take_modifiers() -> None:
    module = MODULES["gfx1201"]
    wave = full_wave("gfx1201", mode=0)
    wave.s[:2] = f32(-4, 0.5).view(np.uint32)
    run(
        "gfx1201",
        wave,
        module.v_s_rcp_f32(module.s[4], module.s[0], abs=1),
        module.v_s_rcp_f32(module.s[5], module.s[0], neg=1, omod=1),
        module.v_s_rcp_f32(module.s[6], module.s[1], clmp=1),
    )
    assert wave.s[4:7].view(np.float32).tolist() == [0.25, 0.5, 1]


@pytest.mark.parametrize("chip", ["gfx942", "gfx1100"])
@pytest.mark.parametrize(("name", "function"), [("v_sin_f32", math.sin), ("v_cos_f32", math.cos)])
def test_sine_and_cosine_of_turns(chip: str, name: str, function: Callable[[float], float]) -> None:
    values = np.concatenate(
        [np.linspace(-3, 3, 601, dtype=np.float32), f32(255.25, -256, 257.125, 1e6, 1e-40)]
    )
    found = evaluate(chip, instruction(chip, name), values).view(np.float32)
    for got, turns in zip(found.tolist(), values.tolist(), strict=True):
        expected = function(2 * math.pi * math.fmod(turns, 1))
        if chip == "gfx942" and abs(turns) > 256:
            expected = 0 if function is math.sin else 1
        assert got == pytest.approx(expected, rel=2**-22, abs=2**-50), turns
    infinite = evaluate(chip, instruction(chip, name), f32(math.inf, -math.inf, math.nan))
    assert np.isnan(infinite.view(np.float32)).all()


# ---- exponents and mantissas


def _exponents() -> npt.NDArray[np.int32]:
    edges = [0, 1, -1, 24, -24, 126, -149, 277, -277, 300, -300, 2**31 - 1, -(2**31)]
    random = np.random.default_rng(2).integers(-160, 160, len(A) - len(edges))
    return np.concatenate([edges, random]).astype(np.int32)


@pytest.mark.parametrize("chip", CHIPS)
def test_ldexp_rounds_once(chip: str) -> None:
    exponents = _exponents()
    found = evaluate(chip, instruction(chip, "v_ldexp_f32"), A, exponents)
    expected = [
        F32.encode(
            F32.decode(bits) * Fraction(2) ** max(-500, min(500, by)), zero_is_negative=bool(bits >> 31)
        )
        if F32.is_finite(bits)
        else bits
        for bits, by in zip(A.tolist(), exponents.tolist(), strict=True)
    ]
    assert_same(found, expected, F32)


@pytest.mark.parametrize("chip", CHIPS)
def test_frexp(chip: str) -> None:
    mantissas = evaluate(chip, instruction(chip, "v_frexp_mant_f32"), A)
    exponents = evaluate(chip, instruction(chip, "v_frexp_exp_i32_f32"), A).view(np.int32)
    with np.errstate(all="ignore"):
        expected = np.frexp(X)
    assert_same(mantissas, _bits(expected[0]), F32)
    assert (exponents == np.where(np.isfinite(X), expected[1], 0)).all()


# ---- division


def _divide(
    chip: str, numerators: npt.NDArray[np.uint32], denominators: npt.NDArray[np.uint32]
) -> npt.NDArray[np.uint32]:
    """As LLVM expands a division (AMDGPUISelLowering, LowerFDIV32), with denormals kept."""
    module, lanes = MODULES[chip], 64 if chip.startswith("gfx9") else 32
    scale, fma = module.v_div_scale_f32, instruction(chip, "v_fma_f32")
    fixup, fmas = instruction(chip, "v_div_fixup_f32"), instruction(chip, "v_div_fmas_f32")
    v, one, nothing = module.v, 1.0, module.s[10:11] if lanes == 64 else module.s[10]
    vcc = module.VCC if lanes == 64 else module.VCC_LO
    wave = full_wave(chip)
    wave.v[0, :lanes], wave.v[1, :lanes] = numerators, denominators
    run(
        chip,
        wave,
        scale(v[2], nothing, v[1], v[1], v[0]),
        scale(v[3], vcc, v[0], v[1], v[0]),
        instruction(chip, "v_rcp_f32")(v[4], v[2]),
        fma(v[5], v[2], v[4], one, neg=1),
        fma(v[4], v[5], v[4], v[4]),
        instruction(chip, "v_mul_f32")(v[6], v[3], v[4]),
        fma(v[7], v[2], v[6], v[3], neg=1),
        fma(v[6], v[7], v[4], v[6]),
        fma(v[7], v[2], v[6], v[3], neg=1),
        fmas(v[8], v[7], v[4], v[6]),
        fixup(v[9], v[8], v[1], v[0]),
    )
    return wave.v[9, :lanes].copy()


@pytest.mark.parametrize("chip", CHIPS)
def test_division_is_correctly_rounded(chip: str) -> None:
    lanes = 64 if chip.startswith("gfx9") else 32
    random = np.random.default_rng(3)
    spread = random.integers(0, 2**32, (2000, 2), np.uint64).astype(np.uint32)
    numerators = np.concatenate([A, spread[:, 0]])
    denominators = np.concatenate([B, spread[:, 1]])
    for first in range(0, len(numerators) - lanes, lanes):
        n, d = numerators[first : first + lanes], denominators[first : first + lanes]
        with np.errstate(all="ignore"):
            expected = n.view(np.float32) / d.view(np.float32)
        assert_same(_divide(chip, n, d), _bits(expected), F32, n.tolist(), d.tolist())


def test_division_scales_back_only_where_it_scaled() -> None:
    module = MODULES["gfx942"]
    wave = full_wave("gfx942")
    wave.s[VCC : VCC + 2] = 0xFFFFFFFF, 0xFFFFFFFF
    wave.set_exec(0b111)
    wave.v[0, :3], wave.v[1, :3] = (
        f32(1, 1e38, 1e38).view(np.uint32),
        f32(3, 3, 1e-30).view(np.uint32),
    )
    run(
        "gfx942", wave, module.v_div_scale_f32(module.v[2], module.VCC, module.v[0], module.v[1], module.v[0])
    )
    assert wave.s[VCC] == 0b110
    assert wave.s[VCC + 1] == 0


# ---- modifiers and modes


def test_sources_take_signs_and_results_are_clamped() -> None:
    encode = instruction("gfx942", "v_fma_f32")
    found = evaluate("gfx942", lambda *args: encode(*args, abs=0b001, neg=0b110), A, B, C)
    expected = [exact.fma(F32, a & ~F32.sign, b ^ F32.sign, c ^ F32.sign) for a, b, c in SAMPLES.tolist()]
    assert_same(found, expected, F32)
    clamped = evaluate("gfx942", lambda *args: encode(*args, clmp=1), A, B, C)
    unclamped = [exact.fma(F32, *row) for row in SAMPLES.tolist()]
    within = [0 if bits == exact.NAN or bits >> 31 else min(bits, 0x3F800000) for bits in unclamped]
    assert clamped.tolist() == within


def test_negation_follows_absolute_value() -> None:
    encode = instruction("gfx1100", "v_mul_f32")
    found = evaluate("gfx1100", lambda *args: encode(*args, abs=1, neg=1), f32(-3, 3), f32(1, 1))
    assert found.view(np.float32).tolist() == [-3, -3]


@pytest.mark.parametrize(("omod", "factor"), [(1, 2), (2, 4), (3, 0.5)])
def test_output_modifiers_need_flushed_denormals(omod: int, factor: float) -> None:
    encode = instruction("gfx942", "v_add_f32")
    values = f32(1.5, -3, 1e37, 100)
    for mode, expected in ((0, values * np.float32(factor)), (KEEP_DENORMALS, values), (IEEE, values)):
        found = evaluate("gfx942", lambda *args: encode(*args, omod=omod), values, f32(0, 0, 0, 0), mode=mode)
        assert_same(found, _bits(expected), F32, mode)


@pytest.mark.parametrize(
    ("mode", "keeps_input", "keeps_output"), [(0xC0, 0, 0), (0xD0, 1, 0), (0xE0, 0, 1), (0xF0, 1, 1)]
)
def test_denormals_are_kept_or_flushed_as_the_mode_says(
    mode: int, keeps_input: bool, keeps_output: bool
) -> None:
    add = instruction("gfx942", "v_add_f32")
    denormal, normal, below = 0x80400000, 0x00800001, 0x80800000  # normal + below is denormal
    found = evaluate("gfx942", add, u32(denormal, normal), u32(0x80000000, below), mode=mode)
    assert found.tolist() == [
        denormal if keeps_input and keeps_output else 0x80000000,
        1 if keeps_output else 0,
    ]


def test_inactive_lanes_keep_their_values() -> None:
    module = MODULES["gfx942"]
    wave = full_wave("gfx942")
    wave.set_exec(0x5555555555555555)
    wave.v[0] = np.arange(64, dtype=np.float32).view(np.uint32)
    wave.v[1] = 0xDEAD
    run("gfx942", wave, module.v_mul_f32_e32(module.v[1], module.v[0], module.v[0]))
    assert wave.v[1].view(np.float32)[::2].tolist() == [float(n * n) for n in range(0, 64, 2)]
    assert (wave.v[1, 1::2] == 0xDEAD).all()


def test_results_of_undefined_values_are_undefined() -> None:
    module = MODULES["gfx942"]
    wave = full_wave("gfx942")
    wave.v_defined[1] = 0xF0
    run(
        "gfx942",
        wave,
        module.v_add_f32_e32(module.v[2], module.v[0], module.v[1]),
        module.v_add_f32_e32(module.v[3], module.v[0], module.v[0]),
    )
    assert wave.v_defined[2] == 0xF0
    assert wave.v_defined[3] == 2**64 - 1


def test_reversed_subtraction_takes_the_subtrahend_from_other_lanes() -> None:
    module = MODULES["gfx942"]
    wave = full_wave("gfx942")
    wave.v[0] = f32(*range(64)).view(np.uint32)
    run("gfx942", wave, with_row_mirror(module.v_subrev_f32_e32(module.v[1], module.v[0], module.v[0]), 0))
    lanes = np.arange(64)
    assert wave.v[1].astype(np.uint32).view(np.float32).tolist() == (lanes - (lanes ^ 15)).tolist()
