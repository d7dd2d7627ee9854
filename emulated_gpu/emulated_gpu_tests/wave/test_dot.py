"""Dot products against exact arithmetic and Python's integers."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from emulated_gpu_tests.wave import exact
from emulated_gpu_tests.wave.evaluation import available, evaluate, f32, instruction, u32
from emulated_gpu_tests.wave.exact import BF16, F16, F32, NAN, Format, assert_same, samples

_random = np.random.default_rng(17)
WORDS = _random.integers(0, 2**32, (900, 3), np.uint64).astype(np.uint32)
WORDS[:8] = np.array(
    [(a, b, c) for a in (2**32 - 1, 0x80808080) for b in (2**32 - 1, 0x7F7F7F7F) for c in (2**31 - 1, 2**31)]
)
WORDS[8:16] = np.array([(0x80008000, 0x80008000, c) for c in (2**31 - 1, 2**31, 2**32 - 1, 0, 1, 2, 3, 4)])
ALL_HIGH = {"opsel_hi": 3, "opsel_hi2": 1}


def _elements(word: int, bits: int, is_signed: bool) -> list[int]:
    fields = [word >> n & (1 << bits) - 1 for n in range(0, 32, bits)]
    return [each - (1 << bits) if is_signed and each >> bits - 1 else each for each in fields]


def _dot(row: Sequence[int], bits: int, signs: tuple[bool, bool, bool], *, clamps: bool = False) -> int:
    a, b = (_elements(row[n], bits, signs[n]) for n in range(2))
    addend = _elements(row[2], 32, signs[2])[0]
    total = addend + sum(x * y for x, y in zip(a, b, strict=True))
    least, most = (-(2**31), 2**31 - 1) if signs[2] else (0, 2**32 - 1)
    return (max(least, min(most, total)) if clamps else total) & 0xFFFFFFFF


INTEGERS = {
    "v_dot2_i32_i16": (16, True),
    "v_dot2_u32_u16": (16, False),
    "v_dot4_i32_i8": (8, True),
    "v_dot4_u32_u8": (8, False),
    "v_dot8_i32_i4": (4, True),
    "v_dot8_u32_u4": (4, False),
}


@pytest.mark.parametrize("clamps", [False, True])
@pytest.mark.parametrize(("chip", "name"), available(INTEGERS, ("gfx942", "gfx1100")))
def test_integers(chip: str, name: str, clamps: bool) -> None:
    bits, is_signed = INTEGERS[name]
    encode = instruction(chip, name)
    found = evaluate(chip, lambda *args: encode(*args, clmp=int(clamps), **ALL_HIGH), *WORDS.T)
    assert found.tolist() == [_dot(row, bits, (is_signed,) * 3, clamps=clamps) for row in WORDS.tolist()]


@pytest.mark.parametrize(("name", "bits"), [("v_dot4_i32_iu8", 8), ("v_dot8_i32_iu4", 4)])
@pytest.mark.parametrize("neg", range(4))
@pytest.mark.parametrize("chip", ["gfx1100", "gfx1201"])
def test_signs_of_integers_that_the_instruction_names(chip: str, name: str, bits: int, neg: int) -> None:
    encode = instruction(chip, name)
    found = evaluate(chip, lambda *args: encode(*args, neg=neg, clmp=1, **ALL_HIGH), *WORDS.T)
    signs = (bool(neg & 1), bool(neg & 2), True)
    assert found.tolist() == [_dot(row, bits, signs, clamps=True) for row in WORDS.tolist()]


def test_halves_of_integers_are_selected() -> None:
    encode = instruction("gfx942", "v_dot2_i32_i16")
    found = evaluate("gfx942", lambda *args: encode(*args, opsel=1, opsel_hi=2, opsel_hi2=1), *WORDS.T)
    swapped = [(row[0] >> 16 | row[0] << 16 & 0xFFFFFFFF, *row[1:]) for row in WORDS.tolist()]
    assert found.tolist() == [_dot(row, 16, (True,) * 3) for row in swapped]


# ---- floats


def _pairs(format_: Format, seed: int) -> list[npt.NDArray[np.uint32]]:
    if format_ is F16:
        rows = samples(F16, 1000, seed)[:, :2].astype(np.uint32)
    else:
        rows = samples(F32, 1000, seed)[:, :2] >> np.uint32(16)
    return [column | np.roll(column, 7) << 16 for column in rows.T]


def _as_f32(format_: Format, bits: int) -> int:
    number = format_.number(bits)
    return int(np.array(number, np.float32).view(np.uint32))


def _sum(first: int, second: int) -> int:
    with np.errstate(all="ignore"):
        values = np.array([_some_nan(first), _some_nan(second)], np.uint32).view(np.float32)
        return int((values[0] + values[1]).view(np.uint32))


def _some_nan(bits: int) -> int:
    return 0x7FC00000 if bits == NAN else bits


def _dot2(format_: Format, a: int, b: int, c: int, *, adds_last: bool = False) -> int:
    low = [_as_f32(format_, each & 0xFFFF) for each in (a, b)]
    high = [_as_f32(format_, each >> 16) for each in (a, b)]
    first = _some_nan(exact.fma(F32, low[0], low[1], 0x80000000 if adds_last else c))
    second = exact.fma(F32, high[0], high[1], first)
    return _sum(second, c) if adds_last else second


@pytest.mark.parametrize(
    ("chip", "name", "adds_last"),
    [
        ("gfx942", "v_dot2_f32_f16", False),
        ("gfx1100", "v_dot2_f32_f16", False),
        ("gfx950", "v_dot2_f32_bf16", True),
        ("gfx1100", "v_dot2_f32_bf16", False),
    ],
)
def test_halves_into_words(chip: str, name: str, adds_last: bool) -> None:
    format_ = BF16 if "bf16" in name else F16
    encode = instruction(chip, name)
    a, b = _pairs(format_, 18)
    c = samples(F32, len(a), 19)[: len(a), 0].copy()
    c[::2] = f32(1.25).view(np.uint32)
    found = evaluate(chip, lambda *args: encode(*args, **ALL_HIGH), a, b, c)
    rows = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    assert_same(found, [_dot2(format_, *row, adds_last=adds_last) for row in rows], F32)


def test_halves_and_signs_are_selected() -> None:
    encode = instruction("gfx942", "v_dot2_f32_f16")
    a, b = u32(0x42003C00), u32(0x44004000)  # 3 and 1, 4 and 2
    modifiers = {"opsel": 1, "opsel_hi": 2, "opsel_hi2": 1, "neg": 1, "neg_hi": 2}
    found = evaluate("gfx942", lambda *args: encode(*args, **modifiers), a, b, f32(100))
    assert found.view(np.float32).tolist() == [100 - 3 * 2 - 1 * 4]


def test_sums_of_f16_are_rounded_after_each_product() -> None:
    a, b = _pairs(F16, 20)
    c = samples(F16, len(a), 21)[: len(a), 2].copy()
    encode = instruction("gfx1100", "v_dot2_f16_f16")
    found = evaluate("gfx1100", encode, a, b, c.astype(np.uint32), before=0x55550000)
    expected = []
    for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True):
        first = exact.fma(F16, x & 0xFFFF, y & 0xFFFF, z)
        expected.append(exact.fma(F16, x >> 16, y >> 16, 0x7E00 if first == NAN else first))
    assert_same(found & 0xFFFF, expected, F16)
    assert set((found >> 16).tolist()) == {0x5555}


def test_sums_of_bf16_are_rounded_after_each_product() -> None:
    a, b = _pairs(BF16, 22)
    a, b = a[600:], b[600:]  # ordinary numbers, whose f32 sums are then rounded again
    c = u32(*(0x3F80 + n % 99 for n in range(len(a))))
    encode = instruction("gfx1100", "v_dot2_bf16_bf16")
    found = evaluate("gfx1100", encode, a, b, c)
    expected = []
    for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True):
        first = _rounded(exact.fma(F32, (x & 0xFFFF) << 16, (y & 0xFFFF) << 16, z << 16))
        expected.append(_rounded(exact.fma(F32, x >> 16 << 16, y >> 16 << 16, first << 16)))
    assert_same(found & 0xFFFF, expected, BF16)


@pytest.mark.parametrize("name", ["v_dot2_f16_f16", "v_dot2_bf16_bf16"])
def test_sums_of_halves_take_signs_and_a_half_of_the_addend(name: str) -> None:
    one, two, three, ten = (
        (0x3F80, 0x4000, 0x4040, 0x4120) if "bf16" in name else (0x3C00, 0x4000, 0x4200, 0x4900)
    )
    encode = instruction("gfx1100", name)
    a, b, c = u32(one << 16 | three), u32(two << 16 | two), u32(ten << 16)
    found = evaluate("gfx1100", lambda *args: encode(*args, opsel=12, neg=1), a, b, c, before=0x5555)
    assert found.tolist() == [two << 16 | 0x5555]  # 10 - 1 * 2 - 3 * 2
    found = evaluate("gfx1100", lambda *args: encode(*args, opsel=4, neg=5, abs=5), a, b, c)
    assert (BF16 if "bf16" in name else F16).number(int(found[0])) == -18


def _rounded(bits: int) -> int:
    with np.errstate(all="ignore"):
        value = np.array(_some_nan(bits), np.uint32).view(np.float32)
        return int(value.astype(ml_dtypes.bfloat16).view(np.uint16))


EIGHT_BITS = {"fp8": ml_dtypes.float8_e4m3fn, "bf8": ml_dtypes.float8_e5m2}


@pytest.mark.parametrize("first", EIGHT_BITS)
@pytest.mark.parametrize("second", EIGHT_BITS)
def test_four_floats_of_8_bits(first: str, second: str) -> None:
    encode = instruction("gfx1201", f"v_dot4_f32_{first}_{second}")
    a, b = WORDS[:, 0].copy(), WORDS[:, 1].copy()
    c = np.linspace(-50, 50, len(a), dtype=np.float32)
    found = evaluate("gfx1201", lambda *args: encode(*args, **ALL_HIGH), a, b, c)
    expected = []
    for x, y, z in zip(a.tolist(), b.tolist(), c, strict=True):
        total = int(z.view(np.uint32))
        for n in range(0, 32, 8):
            factors = [
                int(
                    np.array(word >> n & 255, np.uint8)
                    .view(EIGHT_BITS[kind])
                    .astype(np.float32)
                    .view(np.uint32)
                )
                for word, kind in ((x, first), (y, second))
            ]
            total = _some_nan(exact.fma(F32, factors[0], factors[1], total))
        expected.append(total)
    assert_same(found, expected, F32)
