"""Binary floating-point formats by exact arithmetic on fractions: what IEEE 754 says that a result is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Format:
    """An interchange format; `bias` is that of the exponent."""

    bits: int
    mantissa_bits: int
    bias: int

    @property
    def infinity(self) -> int:
        return ((1 << self.bits - 1 - self.mantissa_bits) - 1) << self.mantissa_bits

    @property
    def sign(self) -> int:
        return 1 << self.bits - 1

    def is_nan(self, bits: int) -> bool:
        return bits & ~self.sign > self.infinity

    def is_finite(self, bits: int) -> bool:
        return bits & ~self.sign < self.infinity

    def decode(self, bits: int) -> Fraction:
        """The value of a finite number."""
        mantissa = bits & (1 << self.mantissa_bits) - 1
        exponent = (bits & ~self.sign) >> self.mantissa_bits
        if exponent:
            mantissa |= 1 << self.mantissa_bits
        value = mantissa * Fraction(2) ** (max(exponent, 1) - self.bias - self.mantissa_bits)
        return -value if bits & self.sign else value

    def number(self, bits: int) -> float:
        """A number that a double represents, infinity or NaN."""
        if self.is_nan(bits):
            return math.nan
        if not self.is_finite(bits):
            return -math.inf if bits & self.sign else math.inf
        return math.copysign(float(abs(self.decode(bits))), -1 if bits & self.sign else 1)

    def encode(self, value: Fraction, *, zero_is_negative: bool = False) -> int:
        """The nearest number, even at ties; infinity past the largest."""
        sign = self.sign if value < 0 or (value == 0 and zero_is_negative) else 0
        magnitude = abs(value)
        if magnitude == 0:
            return sign
        exponent = max(_floor_log2(magnitude), 1 - self.bias)
        units = round(magnitude / Fraction(2) ** (exponent - self.mantissa_bits))  # round() is to even
        bits = units + ((exponent + self.bias - 1) << self.mantissa_bits)
        return sign | min(bits, self.infinity)


def _floor_log2(value: Fraction) -> int:
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if Fraction(2) ** guess <= value else guess - 1


F16 = Format(16, 10, 15)
BF16 = Format(16, 7, 127)
F32 = Format(32, 23, 127)
F64 = Format(64, 52, 1023)
NAN = -1  # stands for every NaN in expected bits


def fma(format_: Format, a: int, b: int, c: int) -> int:
    """A * b + c rounded once, on bits; NAN for any NaN."""
    if all(map(format_.is_finite, (a, b, c))):
        product, addend = format_.decode(a) * format_.decode(b), format_.decode(c)
        product_is_negative = bool((a ^ b) & format_.sign)
        both_negative = product_is_negative and bool(c & format_.sign)
        return format_.encode(product + addend, zero_is_negative=both_negative and product == addend == 0)
    x, y, z = map(format_.number, (a, b, c))
    infinite = math.isinf(x) or math.isinf(y)
    signed = math.copysign(math.inf, x) * math.copysign(1, y) if infinite else x * 0 + y * 0
    result = math.nan if math.isnan(x) or math.isnan(y) or (infinite and 0 in (x, y)) else signed + z
    if math.isnan(result):
        return NAN
    return format_.infinity | (format_.sign if result < 0 else 0)


def chosen(format_: Format, pick: Callable[..., int], *bits: int) -> int:
    """The largest or least number, +0 above -0, without the NaNs; `pick` is max or min."""
    numbers = [each for each in bits if each != NAN and not format_.is_nan(each)]
    return pick(numbers, key=lambda each: _order(format_, each)) if numbers else NAN


def kept(format_: Format, pick: Callable[..., int], *bits: int) -> int:
    """As `chosen`, but a NaN among them is the result."""
    is_any_nan = any(each == NAN or format_.is_nan(each) for each in bits)
    return NAN if is_any_nan else chosen(format_, pick, *bits)


def _order(format_: Format, bits: int) -> int:
    return bits if not bits & format_.sign else -(bits & ~format_.sign) - 1


def extremes(format_: Format) -> dict[str, tuple[int, Callable[[int, int, int], int]]]:
    """Each minimum and maximum that GPUs have: how many sources it has, and what it is of bits a, b, c."""

    def of(pick: Callable[..., int], *bits: int) -> int:
        return chosen(format_, pick, *bits)

    def kept_of(pick: Callable[..., int], *bits: int) -> int:
        return kept(format_, pick, *bits)

    return {
        "max": (2, lambda a, b, c: of(max, a, b)),
        "min": (2, lambda a, b, c: of(min, a, b)),
        "max3": (3, lambda a, b, c: of(max, a, b, c)),
        "min3": (3, lambda a, b, c: of(min, a, b, c)),
        "maxmin": (3, lambda a, b, c: of(min, of(max, a, b), c)),
        "minmax": (3, lambda a, b, c: of(max, of(min, a, b), c)),
        "maximum": (2, lambda a, b, c: kept_of(max, a, b)),
        "minimum": (2, lambda a, b, c: kept_of(min, a, b)),
        "maximum3": (3, lambda a, b, c: kept_of(max, a, b, c)),
        "minimum3": (3, lambda a, b, c: kept_of(min, a, b, c)),
        "maximumminimum": (3, lambda a, b, c: kept_of(min, kept_of(max, a, b), c)),
        "minimummaximum": (3, lambda a, b, c: kept_of(max, kept_of(min, a, b), c)),
    }


def assert_same(found: npt.NDArray[Any], expected: Iterable[int], format_: Format, *about: object) -> None:
    """Bits agree; where a NaN is expected, any will do."""
    for number, (got, want) in enumerate(zip(found.tolist(), expected, strict=True)):
        if want == NAN or format_.is_nan(want):
            assert format_.is_nan(got), (number, hex(got), "NaN", *about)
        else:
            assert got == want, (number, hex(got), hex(want), *about)


EDGES_F32 = (
    *(0x00000000, 0x00000001, 0x00000003, 0x007FFFFF, 0x00800000, 0x00800001, 0x3F800000, 0x3F800001),
    *(0x3F7FFFFF, 0x3F000000, 0x3FC00000, 0x40200000, 0x40490FDB, 0x4B000001, 0x4B7FFFFF, 0x5F000000),
    *(0x7E800000, 0x7F000000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7F800001, 0x3EFFFFFF, 0x33800000),
)
EDGES_F16 = (
    *(0x0000, 0x0001, 0x0003, 0x03FF, 0x0400, 0x0401, 0x3C00, 0x3C01, 0x3BFF, 0x3800, 0x3E00, 0x4100),
    *(0x6400, 0x6401, 0x7800, 0x7BFE, 0x7BFF, 0x7C00, 0x7E00, 0x7C01, 0x1400, 0x0200),
)
EDGES_F64 = (
    *(0, 1, 3, 0x000FFFFFFFFFFFFF, 0x0010000000000000, 0x3FF0000000000000, 0x3FF0000000000001),
    *(0x3FEFFFFFFFFFFFFF, 0x3FE0000000000000, 0x3FF8000000000000, 0x4004000000000000, 0x4330000000000001),
    *(0x7FE0000000000000, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0x7FF8000000000000, 0x7FF0000000000001),
)


def with_signs(edges: Iterable[int], format_: Format) -> list[int]:
    return [bits | sign for bits in edges for sign in (0, format_.sign)]


def samples(format_: Format, count: int, seed: int) -> npt.NDArray[np.unsignedinteger]:
    """Rows of three values' bits: every pair of edges, then `count` random ones.

    Half of those are close in exponent, so that sums cancel and carry.
    """
    edges = with_signs({16: EDGES_F16, 32: EDGES_F32, 64: EDGES_F64}[format_.bits], format_)
    random = np.random.default_rng(seed)
    pairs = [
        (a, b, edges[(7 * n) % len(edges)]) for n, (a, b) in enumerate((a, b) for a in edges for b in edges)
    ]
    anything = random.integers(0, 2**format_.bits, (count // 2, 3), np.uint64)
    mantissas = random.integers(0, 1 << format_.mantissa_bits, (count // 2, 3), np.uint64)
    exponents = random.integers(-3, 4, (count // 2, 3)) + format_.bias
    signs = random.integers(0, 2, (count // 2, 3), np.uint64) << np.uint64(format_.bits - 1)
    close = mantissas | exponents.astype(np.uint64) << np.uint64(format_.mantissa_bits) | signs
    rows = np.concatenate([np.array(pairs, np.uint64), anything, close])
    return rows.astype(f"u{format_.bits // 8}")
