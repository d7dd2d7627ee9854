"""Tests of scalar_float.c against numpy and exact fractions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tinygrad.renderer.amd.dsl import s

from emulated_gpu_tests.wave.operands import (
    RDNA4,
    encoder,
    float_of,
    isa,
    run,
    scalar_results,
)
from emulated_gpu_tests.wave.single_wave import Wave

WIDTHS = pytest.mark.parametrize("width", [16, 32])
MANTISSA = {16: 10, 32: 23}
BIAS = {16: 15, 32: 127}


def edges(width: int) -> list[int]:
    """Bits of zeros, denormals, halves, ones, large values, infinities and NaN, of both signs."""
    m, bias = MANTISSA[width], BIAS[width]
    infinity = 2 * bias + 1 << m
    positive = [
        *(0, 1, 3, (1 << m) - 1, 1 << m, bias - 1 << m, bias << m, (bias << m) + 1, bias << m | 1 << m - 1),
        *(
            bias + 1 << m | 1 << m - 2,
            bias + m << m | 1,
            infinity - 1,
            infinity,
            infinity | 1 << m - 1,
            infinity | 1 << m - 1 | 5,
        ),
    ]
    return positive + [each | 1 << width - 1 for each in positive]


def pairs(width: int, seed: int = 1) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    chosen = edges(width)
    values = [(a, b) for a in chosen[::2] for b in chosen]
    return values + [(rng.getrandbits(width), rng.getrandbits(width)) for _ in range(100)]


def rounded(x: Fraction, width: int) -> int:
    """The nearest float, ties to even, of a number other than 0."""
    m, bias = MANTISSA[width], BIAS[width]
    magnitude, sign = abs(x), (1 << width - 1) * (x < 0)
    exponent = max(math.floor(math.log2(magnitude)), 1 - bias)
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while exponent > 1 - bias and magnitude < Fraction(2) ** exponent:
        exponent -= 1
    steps = round(magnitude / Fraction(2) ** (exponent - m))  # Python rounds ties to even
    bits = steps + (exponent + bias - 1 << m) if steps >> m else steps
    return sign | min(bits, 2 * bias + 1 << m)


def exact(bits: int, width: int) -> Fraction:
    return Fraction(float(float_of(bits, width)))


def is_finite(bits: int, width: int) -> bool:
    return bool(np.isfinite(float_of(bits, width)))


def same(result: int, expected: Any, width: int) -> bool:
    """Equal bits, or both NaN."""
    bits = int(np.asarray(expected).view({16: np.uint16, 32: np.uint32}[width]))
    return (
        bool(np.isnan(expected)) and bool(np.isnan(float_of(result & (1 << width) - 1, width)))
    ) or result == bits


def check(
    name: str, width: int, values: Sequence[tuple[int, ...]], reference: Callable[..., Any], **fields: Any
) -> None:
    make = encoder(RDNA4, name)
    results = scalar_results(
        RDNA4, lambda *r: make(*r, **fields), values, [32] * len(values[0]), sccs=[1] * len(values)
    )
    with np.errstate(all="ignore"):
        for each, (result, scc) in zip(values, results, strict=True):
            expected = reference(*(float_of(bits, width) for bits in each))
            assert same(result, expected, width), (name, [hex(bits) for bits in each], hex(result), expected)
            assert scc == 1


@WIDTHS
def test_sums_and_products_are_correctly_rounded(width: int) -> None:
    check(f"s_add_f{width}", width, pairs(width), lambda a, b: a + b)
    check(f"s_sub_f{width}", width, pairs(width), lambda a, b: a - b)
    check(f"s_mul_f{width}", width, pairs(width), lambda a, b: a * b)


@WIDTHS
def test_multiply_add_rounds_once(width: int) -> None:
    rng = random.Random(2)
    one = BIAS[width] << MANTISSA[width]
    values = [tuple(one - rng.getrandbits(MANTISSA[width] + 2) for _ in range(3)) for _ in range(60)]
    values += [(a, b, c) for a in edges(width)[::4] for b in edges(width)[1::4] for c in edges(width)[::5]]
    values += [(one | 1, one | 1, one | 1 << width - 1), (one + 1, one - 1, one | 1 << width - 1)]
    for old_values in values:
        a, b, c = (bits & (1 << width) - 1 for bits in old_values)
        ((result, _),) = scalar_results(RDNA4, encoder(RDNA4, f"s_fmac_f{width}"), [(a, b)], [32, 32], old=c)
        if not all(is_finite(bits, width) for bits in (a, b, c)):
            with np.errstate(all="ignore"):
                x, y, z = (np.float64(float_of(bits, width)) for bits in (a, b, c))
                expected = {16: np.float16, 32: np.float32}[width](x * y + z)
            assert same(result, expected, width)
            continue
        total = exact(a, width) * exact(b, width) + exact(c, width)
        if total:
            assert result == rounded(total, width), [hex(bits) for bits in (a, b, c)]


def test_multiply_add_with_a_literal() -> None:
    names, wave = isa(RDNA4), Wave()
    wave.s[0], wave.s[1] = np.array([1.5, 7.0], np.float32).view(np.uint32)
    literal = int(np.float32(3.25).view(np.uint32))
    run(
        RDNA4,
        wave,
        [names.s_fmaak_f32(s[2], s[0], s[1], literal), names.s_fmamk_f32(s[3], s[0], s[1], literal)],
    )
    assert wave.s[2:4].view(np.float32).tolist() == [1.5 * 7 + 3.25, 1.5 * 3.25 + 7]


def ordered(a: Any, b: Any) -> list[Any]:
    """-0 before +0."""
    return sorted((a, b), key=lambda x: (x, not np.signbit(x)))


@WIDTHS
@pytest.mark.parametrize("largest", [0, 1])
def test_minima_and_maxima(width: int, largest: int) -> None:
    def number(a: Any, b: Any) -> Any:
        return b if np.isnan(a) else a if np.isnan(b) else ordered(a, b)[largest]

    def propagating(a: Any, b: Any) -> Any:
        return a if np.isnan(a) else b if np.isnan(b) else ordered(a, b)[largest]

    check(f"s_{('min', 'max')[largest]}_num_f{width}", width, pairs(width), number)
    check(f"s_{('minimum', 'maximum')[largest]}_f{width}", width, pairs(width), propagating)


def test_the_nan_of_a_minimum_is_quiet_and_a_signalling_one_comes_first() -> None:
    quiet, signalling, negative_quiet = 0x7FC00001, 0x7F800002, 0xFFC00003
    values = [
        (quiet, signalling),
        (signalling, quiet),
        (negative_quiet, quiet),
        (quiet, negative_quiet),
        (1, signalling),
    ]
    quieted = 0x7FC00002
    results = scalar_results(RDNA4, encoder(RDNA4, "s_minimum_f32"), values, [32, 32])
    assert [x for x, _ in results] == [quieted, quieted, negative_quiet, quiet, quieted]
    results = scalar_results(RDNA4, encoder(RDNA4, "s_max_num_f32"), values, [32, 32])
    assert [x for x, _ in results] == [quiet, quieted, negative_quiet, quiet, 1]


@WIDTHS
def test_rounding_to_integers(width: int) -> None:
    values = [(a,) for a, _ in pairs(width)] + [
        (
            int(
                np.asarray(n / 2, {16: np.float16, 32: np.float32}[width]).view(
                    {16: np.uint16, 32: np.uint32}[width]
                )
            ),
        )
        for n in range(-9, 10)
    ]
    for name, reference in (("ceil", np.ceil), ("floor", np.floor), ("trunc", np.trunc), ("rndne", np.rint)):
        check(f"s_{name}_f{width}", width, values, reference)


RELATIONS: dict[str, Callable[[float, float], bool]] = {
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "lg": lambda a, b: a < b or a > b,
    "ge": lambda a, b: a >= b,
    "o": lambda a, b: not (math.isnan(a) or math.isnan(b)),
}
OPPOSITES = {"nge": "ge", "nlg": "lg", "ngt": "gt", "nle": "le", "neq": "eq", "nlt": "lt", "u": "o"}


@WIDTHS
@pytest.mark.parametrize("name", [*RELATIONS, *OPPOSITES])
def test_comparisons(width: int, name: str) -> None:
    make = encoder(RDNA4, f"s_cmp_{name}_f{width}")
    relation = RELATIONS[OPPOSITES.get(name, name)]
    results = scalar_results(RDNA4, lambda _, a, b: make(a, b), pairs(width), [32, 32])
    for (a, b), (_, scc) in zip(pairs(width), results, strict=True):
        expected = relation(float(float_of(a, width)), float(float_of(b, width)))
        assert scc == int(expected != (name in OPPOSITES))


def test_conversions() -> None:
    integers = [
        (n,) for n in (0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x01000001, 0x01000003, 0xFFFFFF7F, 12345)
    ]
    floats = [(a,) for a, _ in pairs(32)]
    floats += [
        (int(np.float32(x).view(np.uint32)),)
        for x in (1.99, -1.99, 2147483520.0, 2147483648.0, -2147483648.0, 4294967040.0, 4294967296.0)
    ]
    halves = [(a,) for a, _ in pairs(16)]

    def limited(low: int, high: int) -> Callable[[Any], Any]:
        def convert(x: Any) -> Any:
            y = 0 if np.isnan(x) else max(low, min(high, x))
            return np.uint32(int(y) & 0xFFFFFFFF).view(np.float32)

        return convert

    for name, values, width, reference in (
        ("s_cvt_i32_f32", floats, 32, limited(-(1 << 31), (1 << 31) - 1)),
        ("s_cvt_u32_f32", floats, 32, limited(0, (1 << 32) - 1)),
    ):
        results = scalar_results(RDNA4, encoder(RDNA4, name), values, [32])
        expected = [int(reference(float_of(a, width)).view(np.uint32)) for (a,) in values]
        assert [x for x, _ in results] == expected, name
    for name, kind in (("s_cvt_f32_i32", np.int32), ("s_cvt_f32_u32", np.uint32)):
        results = scalar_results(RDNA4, encoder(RDNA4, name), integers, [32])
        numbers = [np.uint32(a).view(kind).astype(np.float32) for (a,) in integers]
        assert [x for x, _ in results] == [int(x.view(np.uint32)) for x in numbers]
    with np.errstate(all="ignore"):
        for (a,), (result, _) in zip(
            floats, scalar_results(RDNA4, encoder(RDNA4, "s_cvt_f16_f32"), floats, [32]), strict=True
        ):
            assert same(result, np.float16(float_of(a, 32)), 16)
    for name, shift in (("s_cvt_f32_f16", 0), ("s_cvt_hi_f32_f16", 16)):
        values = [(a << shift | (0x7E00 if shift else 0),) for (a,) in halves]
        for (a,), (result, _) in zip(
            halves, scalar_results(RDNA4, encoder(RDNA4, name), values, [32]), strict=True
        ):
            assert same(result, np.float32(float_of(a, 16)), 32)


def test_two_floats_become_halves_rounded_toward_zero() -> None:
    values = [(a, b) for a, b in pairs(32) if is_finite(a, 32) and is_finite(b, 32)]
    values += [(0x38800000 - n, 0x3F800000 + 4096 * n) for n in range(20)]
    results = scalar_results(RDNA4, encoder(RDNA4, "s_cvt_pk_rtz_f16_f32"), values, [32, 32])
    for each, (result, _) in zip(values, results, strict=True):
        for bits, half in zip(each, (result & 0xFFFF, result >> 16), strict=True):
            x, y = exact(bits, 32), float(float_of(half, 16))
            assert math.isfinite(y)
            assert half >> 15 == bits >> 31
            assert abs(Fraction(y)) <= abs(x)
            next_larger = float(float_of((half & 0x7FFF) + 1, 16))
            assert math.isinf(next_larger) or Fraction(next_larger) > abs(x)


def test_denormals_are_flushed_where_the_mode_says_so() -> None:
    for mode, expected in ((0xF0, 3), (0xE0, 0), (0xD0, 0), (0xC0, 0)):
        wave = Wave(mode=mode)
        wave.s[0], wave.s[1] = 1, 2
        run(RDNA4, wave, [isa(RDNA4).s_add_f32(s[2], s[0], s[1])])
        assert wave.s[2] == expected
    for mode, expected in ((0xE0, 0x400000), (0xD0, 0)):  # the output alone is denormal
        wave = Wave(mode=mode)
        wave.s[0], wave.s[1] = 0x00800000, 0x3F000000
        run(RDNA4, wave, [isa(RDNA4).s_mul_f32(s[2], s[0], s[1])])
        assert wave.s[2] == expected
    for mode, expected in ((0xF0, 3), (0xB0, 0), (0x70, 0)):
        wave = Wave(mode=mode)
        wave.s[0], wave.s[1] = 1, 2
        run(RDNA4, wave, [isa(RDNA4).s_add_f16(s[2], s[0], s[1])])
        assert wave.s[2] == expected
    for mode, expected in ((0xB0, 0x200), (0x70, 0)):
        wave = Wave(mode=mode)
        wave.s[0], wave.s[1] = 0x0400, 0x3800
        run(RDNA4, wave, [isa(RDNA4).s_mul_f16(s[2], s[0], s[1])])
        assert wave.s[2] == expected


FUNCTIONS: dict[str, Callable[[float], float]] = {
    "exp": lambda x: 2**x,
    "log": math.log2,
    "rcp": lambda x: 1 / x,
    "rsq": lambda x: 1 / math.sqrt(x),
    "sqrt": math.sqrt,
}
FLOATS: dict[int, tuple[npt.DTypeLike, npt.DTypeLike]] = {
    16: (np.float16, np.uint16),
    32: (np.float32, np.uint32),
}


def functions_of(name: str, width: int, *values: float, **modifiers: int) -> list[float]:
    """The results of v_s_<name>_f<width> for values in scalar registers."""
    encode = encoder(RDNA4, f"v_s_{name}_f{width}")
    kind, bits = FLOATS[width]
    sources = [(int(np.asarray(value, kind).view(bits)),) for value in values]
    results = scalar_results(RDNA4, lambda d, x: encode(d, x, **modifiers), sources, [32])
    return [float(np.asarray(result, np.uint32).astype(bits).view(kind)) for result, _ in results]


@WIDTHS
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str, width: int) -> None:
    values = [0.125, 0.3, 0.75, 1.0, 1.5, 3.0, 7.7]
    exact = [float(np.asarray(value, FLOATS[width][0])) for value in values]
    expected = [FUNCTIONS[name](value) for value in exact]
    tolerance = 2.0 ** -MANTISSA[width]
    np.testing.assert_allclose(functions_of(name, width, *values), expected, rtol=tolerance)


@WIDTHS
def test_modifiers_of_functions(width: int) -> None:
    values = [-4.0, 0.5, 4.0]
    assert functions_of("rcp", width, *values, abs=1) == [0.25, 2, 0.25]
    assert functions_of("rcp", width, *values, neg=1) == [0.25, -2, -0.25]
    assert functions_of("rcp", width, *values, abs=1, neg=1) == [-0.25, -2, -0.25]
    assert functions_of("rcp", width, *values, clmp=1) == [0, 1, 0.25]
