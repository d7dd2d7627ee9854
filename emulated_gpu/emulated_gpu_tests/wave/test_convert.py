"""Conversions against numpy, ml_dtypes and Python's numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from emulated_gpu_tests.wave.evaluation import (
    MODULES,
    available,
    evaluate,
    f32,
    full_wave,
    instruction,
    run,
    u32,
)
from emulated_gpu_tests.wave.exact import BF16, F16, F32, F64, NAN, assert_same, samples
from emulated_gpu_tests.wave.single_wave import KEEP_DENORMALS

CHIPS = ("gfx942", "gfx1100", "gfx1201")
EVERY_HALF = np.arange(0x10000, dtype=np.uint16)
EVERY_BYTE = np.arange(256, dtype=np.uint32)
_random = np.random.default_rng(12)
INTEGERS = np.concatenate(
    [
        u32(0, 1, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x1000001, 0x7FFFFFFF, 0x80000000, 0xFFFF8000),
        u32(0xFFFF7FFF, 0xFFFFFFFF, 0xFF800001),
        _random.integers(0, 2**32, 500, np.uint64).astype(np.uint32),
        _random.integers(0, 2**17, 500, np.uint64).astype(np.uint32) - u32(2**16),
    ]
)
_ENDS = [
    n + d
    for n in (0, 127, 128, 255, 32767, 32768, 65535, 65536)
    for d in (-0.75, -0.5, -0.25, 0, 0.25, 0.5, 1.5)
]
FLOATS = np.concatenate(
    [
        samples(F32, 800, seed=13)[:, 0].copy().view(np.float32),
        f32(*_ENDS, *(-each for each in _ENDS)),
        f32(2**31, -(2**31), 2**31 - 128, -(2**31) - 256, 2**32, 2**32 - 256, 0.49999997, 2.5, 3.5, -0.5),
        f32(
            448,
            464,
            465,
            240,
            248,
            249,
            57344,
            61440,
            61441,
            2**-9,
            2**-10,
            1.5 * 2**-10,
            2**-16,
            2**-17,
            2**-18,
        ),
        f32(65504, 65519, 65520, 65536, 2**-24, 2**-25, 1.5 * 2**-25, 6.1e-5),
        _random.uniform(-1.5, 1.5, 300).astype(np.float32),
        (_random.uniform(-600, 600, 300)).astype(np.float32),
    ]
)
with np.errstate(invalid="ignore"):  # signalling NaNs
    DOUBLES = np.concatenate(
        [samples(F64, 600, seed=14)[:, 0].copy().view(np.float64), FLOATS * np.float64(1 + 1e-9)]
    )

INT_RANGES = {
    "i32": (-(2**31), 2**31 - 1),
    "u32": (0, 2**32 - 1),
    "i16": (-(2**15), 2**15 - 1),
    "u16": (0, 2**16 - 1),
}


def _integer(value: float, kind: str) -> int:
    """Towards zero, to the nearest end, and NaN to 0; as unsigned bits."""
    least, most = INT_RANGES[kind]
    if math.isnan(value):
        return 0
    whole = (most if value > 0 else least) if math.isinf(value) else max(least, min(most, math.trunc(value)))
    return whole & ((1 << int(kind[1:])) - 1)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("kind", ["i32", "u32"])
def test_floats_to_words(chip: str, kind: str) -> None:
    found = evaluate(chip, instruction(chip, f"v_cvt_{kind}_f32"), FLOATS)
    assert found.tolist() == [_integer(float(each), kind) for each in FLOATS]
    found = evaluate(chip, instruction(chip, f"v_cvt_{kind}_f64"), DOUBLES)
    assert found.tolist() == [_integer(float(each), kind) for each in DOUBLES]


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("kind", ["i16", "u16"])
def test_halves_to_halves(chip: str, kind: str) -> None:
    found = evaluate(chip, instruction(chip, f"v_cvt_{kind}_f16"), EVERY_HALF, before=0x55550000)
    assert (found & 0xFFFF).tolist() == [_integer(float(each), kind) for each in EVERY_HALF.view(np.float16)]
    assert set((found >> 16).tolist()) == {0 if chip == "gfx942" else 0x5555}


@pytest.mark.parametrize("chip", CHIPS)
def test_floats_to_words_by_floor(chip: str) -> None:
    floor = evaluate(chip, instruction(chip, "v_cvt_flr_i32_f32"), FLOATS)
    nearest = evaluate(chip, instruction(chip, "v_cvt_rpi_i32_f32"), FLOATS)
    with np.errstate(all="ignore"):
        assert floor.tolist() == [_integer(float(each), "i32") for each in np.floor(FLOATS)]
        rounded = np.floor(FLOATS + np.float32(0.5))
    assert nearest.tolist() == [_integer(float(each), "i32") for each in rounded]


@pytest.mark.parametrize("chip", CHIPS)
def test_integers_to_floats(chip: str) -> None:
    def found(name: str, dtype: npt.DTypeLike = np.uint32) -> npt.NDArray[Any]:
        return evaluate(chip, instruction(chip, name), INTEGERS, dtype=dtype)

    signed = INTEGERS.view(np.int32)
    assert (found("v_cvt_f32_i32").view(np.float32) == signed.astype(np.float32)).all()
    assert (found("v_cvt_f32_u32").view(np.float32) == INTEGERS.astype(np.float32)).all()
    assert (found("v_cvt_f64_i32", np.uint64).view(np.float64) == signed).all()
    assert (found("v_cvt_f64_u32", np.uint64).view(np.float64) == INTEGERS).all()
    for byte in range(4):
        assert (found(f"v_cvt_f32_ubyte{byte}").view(np.float32) == (INTEGERS >> 8 * byte & 255)).all()
    offsets = ((INTEGERS & 15).astype(int) ^ 8) - 8
    assert (found("v_cvt_off_f32_i4").view(np.float32) == offsets / 16).all()
    half_signed = EVERY_HALF.view(np.int16)
    as_half = evaluate(chip, instruction(chip, "v_cvt_f16_i16"), EVERY_HALF)
    assert_same(as_half & 0xFFFF, half_signed.astype(np.float16).view(np.uint16).tolist(), F16)
    as_half = evaluate(chip, instruction(chip, "v_cvt_f16_u16"), EVERY_HALF)
    with np.errstate(over="ignore"):
        assert_same(as_half & 0xFFFF, EVERY_HALF.astype(np.float16).view(np.uint16).tolist(), F16)


def test_halves_to_words() -> None:
    found = evaluate("gfx1100", instruction("gfx1100", "v_cvt_i32_i16"), EVERY_HALF)
    assert (found.view(np.int32) == EVERY_HALF.view(np.int16)).all()
    assert (evaluate("gfx1100", instruction("gfx1100", "v_cvt_u32_u16"), EVERY_HALF) == EVERY_HALF).all()


@pytest.mark.parametrize("chip", CHIPS)
def test_floats_to_floats(chip: str) -> None:
    with np.errstate(all="ignore"):
        narrow = FLOATS.astype(np.float16).view(np.uint16).tolist()
        single = DOUBLES.astype(np.float32).view(np.uint32).tolist()
        wide = EVERY_HALF.view(np.float16).astype(np.float32).view(np.uint32).tolist()
        double = FLOATS.astype(np.float64).view(np.uint64).tolist()
    found = evaluate(chip, instruction(chip, "v_cvt_f16_f32"), FLOATS, before=0x55550000)
    assert_same(found & 0xFFFF, narrow, F16)
    assert set((found >> 16).tolist()) == {0 if chip == "gfx942" else 0x5555}
    assert_same(evaluate(chip, instruction(chip, "v_cvt_f32_f64"), DOUBLES), single, F32)
    assert_same(evaluate(chip, instruction(chip, "v_cvt_f32_f16"), EVERY_HALF), wide, F32)
    assert_same(evaluate(chip, instruction(chip, "v_cvt_f64_f32"), FLOATS, dtype=np.uint64), double, F64)


def test_bf16() -> None:
    found = evaluate("gfx950", instruction("gfx950", "v_cvt_f32_bf16"), EVERY_HALF)
    assert_same(found, (EVERY_HALF.astype(np.uint32) << 16).tolist(), F32)
    other = FLOATS[::-1].copy()
    pair = evaluate("gfx950", instruction("gfx950", "v_cvt_pk_bf16_f32"), FLOATS, other)
    with np.errstate(all="ignore"):
        assert_same(pair & 0xFFFF, FLOATS.astype(ml_dtypes.bfloat16).view(np.uint16).tolist(), BF16)
        assert_same(pair >> 16, other.astype(ml_dtypes.bfloat16).view(np.uint16).tolist(), BF16)


# ---- two at once


def _towards_zero(value: np.float32) -> int:
    """The f16 nearest `value` that is no further from zero."""
    if np.isnan(value):
        return NAN
    if np.isinf(value):
        return 0x7C00 if value > 0 else 0xFC00
    with np.errstate(all="ignore"):
        nearest = value.astype(np.float16)
    if abs(float(nearest)) > abs(float(value)):
        nearest = np.nextafter(nearest, np.float16(0))
    return int(nearest.view(np.uint16)) | (0x8000 if np.signbit(value) else 0)


def _norm(value: float, most: int) -> int:
    least = -1 if most == 32767 else 0
    return 0 if math.isnan(value) else round(max(least, min(1, value)) * most) & 0xFFFF


PAIRS: dict[str, Callable[[np.float32], int]] = {
    "v_cvt_pkrtz_f16_f32": _towards_zero,
    "v_cvt_pknorm_i16_f32": lambda x: _norm(float(x), 32767),
    "v_cvt_pknorm_u16_f32": lambda x: _norm(float(x), 65535),
    "v_cvt_pk_i16_f32": lambda x: _integer(float(x), "i16"),
    "v_cvt_pk_u16_f32": lambda x: _integer(float(x), "u16"),
}


@pytest.mark.parametrize(("chip", "name"), available(PAIRS, CHIPS))
def test_pairs_of_floats(chip: str, name: str) -> None:
    other = FLOATS[::-1].copy()
    found = evaluate(chip, instruction(chip, name), FLOATS, other)
    assert_same(found & 0xFFFF, [PAIRS[name](each) for each in FLOATS], F16 if "rtz" in name else F32, name)
    assert_same(found >> 16, [PAIRS[name](each) for each in other], F16 if "rtz" in name else F32, name)


def test_pairs_of_f16_to_nearest() -> None:
    found = evaluate("gfx950", instruction("gfx950", "v_cvt_pk_f16_f32"), FLOATS, -FLOATS)
    with np.errstate(all="ignore"):
        assert_same(found & 0xFFFF, FLOATS.astype(np.float16).view(np.uint16).tolist(), F16)
        assert_same(found >> 16, (-FLOATS).astype(np.float16).view(np.uint16).tolist(), F16)


@pytest.mark.parametrize("chip", ["gfx942", "gfx1100"])
@pytest.mark.parametrize(("kind", "most"), [("i16", 32767), ("u16", 65535)])
def test_halves_as_fractions(chip: str, kind: str, most: int) -> None:
    expected = [_norm(float(each), most) for each in EVERY_HALF.view(np.float16)]
    found = evaluate(chip, instruction(chip, f"v_cvt_norm_{kind}_f16"), EVERY_HALF)
    assert (found & 0xFFFF).tolist() == expected
    found = evaluate(chip, instruction(chip, f"v_cvt_pknorm_{kind}_f16"), EVERY_HALF, EVERY_HALF[::-1].copy())
    assert (found & 0xFFFF).tolist() == expected
    assert (found >> 16).tolist() == expected[::-1]


@pytest.mark.parametrize("chip", ["gfx942", "gfx1100"])
def test_pairs_of_words_saturate(chip: str) -> None:
    other = INTEGERS[::-1].copy()
    found = evaluate(chip, instruction(chip, "v_cvt_pk_i16_i32"), INTEGERS, other)
    low, high = (np.clip(each.view(np.int32), -32768, 32767) & 0xFFFF for each in (INTEGERS, other))
    assert (found == (low | high << 16).view(np.uint32)).all()
    found = evaluate(chip, instruction(chip, "v_cvt_pk_u16_u32"), INTEGERS, other)
    assert (found == (np.minimum(INTEGERS, 65535) | np.minimum(other, 65535) << 16)).all()


@pytest.mark.parametrize("chip", ["gfx942", "gfx1100"])
def test_a_byte_in_its_place(chip: str) -> None:
    places, old = np.arange(len(FLOATS), dtype=np.uint32), np.full(len(FLOATS), 0x12345678, np.uint32)
    found = evaluate(chip, instruction(chip, "v_cvt_pk_u8_f32"), FLOATS, places, old)
    bytes_ = [min(_integer(float(each), "u16"), 255) for each in FLOATS]
    shifts = [8 * (n & 3) for n in range(len(FLOATS))]
    expected = [0x12345678 & ~(255 << by) | byte << by for byte, by in zip(bytes_, shifts, strict=True)]
    assert found.tolist() == expected


# ---- floats of 8 bits


EIGHT_BITS = {
    ("gfx942", "fp8"): ml_dtypes.float8_e4m3fnuz,
    ("gfx942", "bf8"): ml_dtypes.float8_e5m2fnuz,
    ("gfx950", "fp8"): ml_dtypes.float8_e4m3fn,
    ("gfx950", "bf8"): ml_dtypes.float8_e5m2,
    ("gfx1201", "fp8"): ml_dtypes.float8_e4m3fn,
    ("gfx1201", "bf8"): ml_dtypes.float8_e5m2,
}


@pytest.mark.parametrize(("chip", "kind"), EIGHT_BITS)
def test_every_byte_to_f32(chip: str, kind: str) -> None:
    values = EVERY_BYTE.astype(np.uint8).view(EIGHT_BITS[chip, kind]).astype(np.float32)
    found = evaluate(chip, instruction(chip, f"v_cvt_f32_{kind}"), EVERY_BYTE)
    assert_same(found, values.view(np.uint32).tolist(), F32)
    pairs = evaluate(chip, instruction(chip, f"v_cvt_pk_f32_{kind}"), EVERY_BYTE | 0x3800, dtype=np.uint64)
    assert_same(pairs & np.uint64(0xFFFFFFFF), values.view(np.uint32).tolist(), F32)
    assert_same(pairs >> np.uint64(32), [int(values[0x38].view(np.uint32))] * 256, F32)


@pytest.mark.parametrize(("opsel", "byte"), [(0, 0), (2, 1), (1, 2), (3, 3)])
def test_rdna_selects_bytes_by_reversed_bits(opsel: int, byte: int) -> None:
    encode = instruction("gfx1201", "v_cvt_f32_fp8")
    found = evaluate("gfx1201", lambda *args: encode(*args, opsel=opsel), u32(0x48403830))
    assert found.view(np.float32).tolist() == [0.5 * 2**byte]


@pytest.mark.parametrize(("chip", "kind"), EIGHT_BITS)
def test_f32_to_bytes(chip: str, kind: str) -> None:
    other = FLOATS[::-1].copy()
    found = evaluate(chip, instruction(chip, f"v_cvt_pk_{kind}_f32"), FLOATS, other, before=0x55555555)
    with np.errstate(all="ignore"):
        low, high = (each.astype(EIGHT_BITS[chip, kind]) for each in (FLOATS, other))
    for got, wanted in ((found & 0xFF, low), (found >> 8 & 0xFF, high)):
        got_values = got.astype(np.uint8).view(EIGHT_BITS[chip, kind])
        is_nan = np.isnan(wanted.astype(np.float32))
        assert np.isnan(got_values[is_nan].astype(np.float32)).all()
        assert (got[~is_nan] == wanted[~is_nan].view(np.uint8)).all()
    assert set((found >> 16).tolist()) == {0x5555}


@pytest.mark.parametrize("kind", ["fp8", "bf8"])
def test_f32_over_a_power_of_two_to_bytes(kind: str) -> None:
    """The scale's exponent counts, not its sign and mantissa."""
    scales = np.resize(f32(1.0, 0.25, -16.0, 3.0), FLOATS.shape)
    powers = np.resize(f32(1.0, 0.25, 16.0, 2.0), FLOATS.shape)
    other = FLOATS[::-1].copy()
    encode = instruction("gfx950", f"v_cvt_scalef32_pk_{kind}_f32")
    found = evaluate("gfx950", encode, FLOATS, other, scales, before=0x55555555)
    plain = instruction("gfx950", f"v_cvt_pk_{kind}_f32")
    with np.errstate(all="ignore"):
        expected = evaluate("gfx950", plain, FLOATS / powers, other / powers, before=0x55555555)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("chip", "kind"), EIGHT_BITS)
def test_bytes_saturate_where_the_mode_says(chip: str, kind: str) -> None:
    values = f32(1e6, -1e6, 1e-30, math.inf)
    mode = KEEP_DENORMALS | 1 << 23
    encode = instruction(chip, f"v_cvt_pk_{kind}_f32")
    found = evaluate(chip, lambda *args: encode(*args, opsel=8), values, values, before=0x1234, mode=mode)
    finite = EVERY_BYTE.astype(np.uint8).view(EIGHT_BITS[chip, kind]).astype(np.float32)
    largest = float(finite[np.isfinite(finite)].max())
    numbers = (found >> 16 & 0xFF).astype(np.uint8).view(EIGHT_BITS[chip, kind]).astype(np.float32)
    assert numbers[:3].tolist() == [largest, -largest, 0]
    assert not np.isfinite(numbers[3])
    assert set((found & 0xFFFF).tolist()) == {0x1234}


def test_sdwa_selects_what_is_converted() -> None:
    module = MODULES["gfx942"]
    wave = full_wave("gfx942")
    wave.v[0] = 0x40003C00  # halves 2 and 1
    wave.v[1] = 0x30384048  # bytes
    word = module.v_cvt_f32_f16_e32(module.v[2], module.v[0]).to_bytes()
    byte = module.v_cvt_f32_fp8_e32(module.v[3], module.v[1]).to_bytes()
    run("gfx942", wave, _with_sdwa(word, 0, source=5), _with_sdwa(byte, 1, source=2))
    assert wave.v[2].view(np.float32)[0] == 2
    assert wave.v[3].view(np.float32)[0] == 0.5  # 0x38 in E4M3 FNUZ


def _with_sdwa(code: bytes, register: int, source: int) -> bytes:
    """A short form with the SDWA marker (249) as source 0, and the word that names the real one."""
    first = int.from_bytes(code, "little") & ~0x1FF | 0xF9
    second = register | 6 << 8 | source << 16 | 6 << 24  # dst_sel, src0_sel, src1_sel: DWORD is 6
    return first.to_bytes(4, "little") + second.to_bytes(4, "little")
