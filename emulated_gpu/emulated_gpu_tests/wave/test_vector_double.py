"""Operations on f64 against exact arithmetic and numpy."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from emulated_gpu.chips import CHIPS as ALL
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
from emulated_gpu_tests.wave.exact import F64, NAN, assert_same, chosen, extremes, samples
from emulated_gpu_tests.wave.single_wave import KEEP_DENORMALS

CHIPS = ("gfx942", "gfx1100")
SAMPLES = samples(F64, 600, seed=9)
A, B, C = (SAMPLES[:, n].copy() for n in range(3))
X, Y = A.view(np.float64), B.view(np.float64)


def _bits(values: npt.ArrayLike) -> list[int]:
    return [int(each) for each in np.asarray(values, np.float64).view(np.uint64)]


def _evaluate(
    chip: str, name: str, *sources: npt.NDArray[Any], mode: int = KEEP_DENORMALS
) -> npt.NDArray[Any]:
    return evaluate(chip, instruction(chip, name), *sources, dtype=np.uint64, mode=mode)


@pytest.mark.parametrize(
    ("chip", "name"), [(chip, name) for chip in CHIPS for name in ("v_add_f64", "v_mul_f64")]
)
def test_sums_and_products_are_rounded_to_nearest_even(chip: str, name: str) -> None:
    with np.errstate(all="ignore"):
        expected = X + Y if "add" in name else X * Y
    assert_same(_evaluate(chip, name, A, B), _bits(expected), F64)


@pytest.mark.parametrize("chip", CHIPS)
def test_fma_rounds_once(chip: str) -> None:
    found = _evaluate(chip, "v_fma_f64", A, B, C)
    assert_same(found, [exact.fma(F64, *row) for row in SAMPLES.tolist()], F64)


EXTREMES = {f"v_{name}_f64": each for name, each in extremes(F64).items() if each[0] == 2}


@pytest.mark.parametrize(("chip", "name"), available(EXTREMES))
def test_extremes_order_zeros_and_drop_or_keep_nans(chip: str, name: str) -> None:
    if chip == "gfx1201" and name in ("v_max_f64", "v_min_f64"):
        found = evaluate(
            chip, getattr(MODULES[chip], name.replace("_f64", "_num_f64_e64")), A, B, dtype=np.uint64
        )
    else:
        found = _evaluate(chip, name, A, B)
    assert_same(found, [EXTREMES[name][1](*row) for row in SAMPLES.tolist()], F64)


def test_extremes_keep_signalling_nans_in_ieee_mode() -> None:
    found = _evaluate("gfx942", "v_max_f64", A, B, mode=KEEP_DENORMALS | IEEE)
    signalling = [
        any(F64.is_nan(each) and not each >> 51 & 1 for each in row[:2]) for row in SAMPLES.tolist()
    ]
    expected = [
        NAN if is_kept else chosen(F64, max, *row[:2])
        for is_kept, row in zip(signalling, SAMPLES.tolist(), strict=True)
    ]
    assert_same(found, expected, F64)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("v_rcp_f64", lambda x: 1 / x),
        ("v_rsq_f64", lambda x: 1 / np.sqrt(x)),
        ("v_sqrt_f64", np.sqrt),
        ("v_trunc_f64", np.trunc),
        ("v_ceil_f64", np.ceil),
        ("v_floor_f64", np.floor),
        ("v_rndne_f64", np.rint),
        (
            "v_fract_f64",
            lambda x: np.minimum(x - np.floor(x), np.where(np.isfinite(x), 1 - 2.0**-53, np.nan)),
        ),
        ("v_frexp_mant_f64", lambda x: np.frexp(x)[0]),
    ],
)
def test_functions_of_one_value(
    chip: str, name: str, reference: Callable[..., npt.NDArray[np.float64]]
) -> None:
    values = np.concatenate([X, np.arange(-8, 8, 0.25)])
    with np.errstate(all="ignore"):
        assert_same(_evaluate(chip, name, values), _bits(reference(values)), F64, name)


@pytest.mark.parametrize("chip", CHIPS)
def test_frexp_and_ldexp(chip: str) -> None:
    exponents = evaluate(chip, instruction(chip, "v_frexp_exp_i32_f64"), A).view(np.int32)
    with np.errstate(all="ignore"):
        assert (exponents == np.where(np.isfinite(X), np.frexp(X)[1], 0)).all()
    by = np.random.default_rng(10).integers(-1100, 1100, len(A)).astype(np.int32)
    by[:4] = 2**31 - 1, -(2**31), 2098, -2098
    expected = [
        F64.encode(
            F64.decode(bits) * Fraction(2) ** max(-2200, min(2200, n)), zero_is_negative=bool(bits & F64.sign)
        )
        if F64.is_finite(bits)
        else bits
        for bits, n in zip(A.tolist(), by.tolist(), strict=True)
    ]
    assert_same(_evaluate(chip, "v_ldexp_f64", A, by), expected, F64)


def _divide(
    chip: str, numerators: npt.NDArray[np.uint64], denominators: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """As LLVM expands a division (SIISelLowering, LowerFDIV64)."""
    module, lanes = MODULES[chip], ALL[chip].lanes
    fma = instruction(chip, "v_fma_f64")
    nothing = module.s[10:11] if lanes == 64 else module.s[10]
    vcc = module.VCC if lanes == 64 else module.VCC_LO
    wave = full_wave(chip)
    for register, values in ((0, numerators), (2, denominators)):
        wave.v[register : register + 2, :lanes] = values.view(np.uint32).reshape(-1, 2).T
    num, den, scaled, inverse, error, up, quotient, rest, result = (
        module.v[n : n + 1] for n in range(0, 18, 2)
    )
    run(
        chip,
        wave,
        module.v_div_scale_f64(scaled, nothing, den, den, num),
        instruction(chip, "v_rcp_f64")(inverse, scaled),
        fma(error, scaled, inverse, 1.0, neg=1),
        fma(inverse, inverse, error, inverse),
        fma(error, scaled, inverse, 1.0, neg=1),
        fma(inverse, inverse, error, inverse),
        module.v_div_scale_f64(up, vcc, num, den, num),
        instruction(chip, "v_mul_f64")(quotient, up, inverse),
        fma(rest, scaled, quotient, up, neg=1),
        instruction(chip, "v_div_fmas_f64")(result, rest, inverse, quotient),
        instruction(chip, "v_div_fixup_f64")(result, result, den, num),
    )
    return wave.v[16:18, :lanes].T.copy().view(np.uint64).reshape(-1)


@pytest.mark.parametrize("chip", CHIPS)
def test_division_is_correctly_rounded_but_for_denormal_quotients(chip: str) -> None:
    spread = np.random.default_rng(11).integers(0, 2**64, (1500, 2), np.uint64)
    numerators, denominators = np.concatenate([A, spread[:, 0]]), np.concatenate([B, spread[:, 1]])
    lanes = ALL[chip].lanes
    for first in range(0, len(numerators) - lanes, lanes):
        n, d = numerators[first : first + lanes], denominators[first : first + lanes]
        with np.errstate(all="ignore"):
            expected = n.view(np.float64) / d.view(np.float64)
        found = _divide(chip, n, d)
        is_denormal = (np.abs(expected) < 2.0**-1021) & (expected != 0)
        assert_same(found[~is_denormal], _bits(expected[~is_denormal]), F64)
        assert (np.abs((found - expected.view(np.uint64)).view(np.int64))[is_denormal] <= 1).all()


def test_modifiers_and_modes() -> None:
    encode = instruction("gfx942", "v_fma_f64")
    values = np.array([-1.5, 0.25, 3])
    one, zero = np.ones(3), np.zeros(3)

    def found(mode: int = KEEP_DENORMALS, **modifiers: int) -> list[float]:
        bits = evaluate(
            "gfx942", lambda *args: encode(*args, **modifiers), values, one, zero, dtype=np.uint64, mode=mode
        )
        return [float(each) for each in bits.view(np.float64)]

    assert found(abs=1) == [1.5, 0.25, 3]
    assert found(neg=1) == [1.5, -0.25, -3]
    assert found(clmp=1) == [0, 0.25, 1]
    assert found(omod=1) == [-1.5, 0.25, 3]
    assert found(mode=0, omod=1) == [-3, 0.5, 6]
    assert found(mode=0, omod=3) == [-0.75, 0.125, 1.5]


@pytest.mark.parametrize(("mode", "expected"), [(0xC0, 1 << 51), (0x40, 0), (0x80, 0)])
def test_denormals_are_kept_or_flushed_as_the_mode_says(mode: int, expected: int) -> None:
    found = _evaluate("gfx942", "v_mul_f64", np.array([1 << 51], np.uint64), np.ones(1), mode=mode)
    assert found.tolist() == [expected]


def test_inactive_lanes_keep_their_values() -> None:
    module = MODULES["gfx942"]
    wave = full_wave("gfx942")
    wave.set_exec(0b10)
    wave.v[0, :2] = 0
    wave.v[1, :2] = f32(1.75).view(np.uint32)  # the upper word of a number that the sum doubles
    before = wave.v[2:4].copy()
    run("gfx942", wave, instruction("gfx942", "v_add_f64")(module.v[2:3], module.v[0:1], module.v[0:1]))
    assert (wave.v[2:4, 0] == before[:, 0]).all()
    assert wave.v[3, 1] == f32(1.75).view(np.uint32)[0] + (1 << 20)
