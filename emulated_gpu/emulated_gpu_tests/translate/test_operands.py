"""Constants in the width and format that operands read, and registers that share a number across chips."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from emulated_gpu.machine_code.formats import OperandType
from emulated_gpu.translate.operands import M0, Machine, dwords_of, scalar, source
from emulated_gpu.translate.program import NOTHING, OperandKind

CDNA = Machine("gfx942", "cdna", 64)
RDNA = Machine("gfx1100", "rdna3", 32)

ONE, MINUS_FOUR, INVERSE_OF_2_PI, LITERAL = 242, 247, 248, 255


def value(code: int, bits: int, element: str, literal: int = 0) -> int:
    operand = source(code, OperandType(bits, element, "SRC"), CDNA, literal)
    assert operand.kind is OperandKind.CONSTANT
    return operand.value


@pytest.mark.parametrize(
    ("bits", "element"), [(16, "I16"), (32, "U32"), (32, "F32"), (64, "F64"), (64, "B64")]
)
def test_integers_are_bit_patterns_of_any_format(bits: int, element: str) -> None:
    assert [value(128 + number, bits, element) for number in range(65)] == list(range(65))
    expected = [-number & 0xFFFFFFFFFFFFFFFF for number in range(1, 17)]
    assert [value(192 + number, bits, element) for number in range(1, 17)] == expected


@pytest.mark.parametrize(
    ("bits", "element", "dtype"),
    [
        *((16, element, "f2") for element in ("F16", "I16", "U16", "B16")),
        *((32, element, "f4") for element in ("F32", "U32", "B32", "I32")),
        *((64, element, "f8") for element in ("F64", "B64", "U64", "I64")),
        *((128, element, "f4") for element in ("PK4_F32", "WMMA_DC_16X16_F32")),
        (256, "WMMA_DC_F16", "f2"),
        (32, "PK2_F16", "f2"),
        (32, "PK2_I16", "f4"),
    ],
)
def test_floats_have_the_width_of_an_element(bits: int, element: str, dtype: str) -> None:
    numbers = (0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0)
    for code, number in enumerate(numbers, start=240):
        assert value(code, bits, element) == int.from_bytes(np.array(number, dtype).tobytes(), "little")


@pytest.mark.parametrize(
    ("bits", "element", "dtype"), [(16, "F16", "f2"), (32, "F32", "f4"), (64, "F64", "f8")]
)
def test_the_inverse_of_two_pi_is_rounded_to_the_format(bits: int, element: str, dtype: str) -> None:
    expected = int.from_bytes(np.array(1 / (2 * np.pi), dtype).tobytes(), "little")
    # AMD's manuals give 0x3e22f983 and 0x3fc45f306dc9c882, the latter one below the nearest f64.
    assert abs(value(INVERSE_OF_2_PI, bits, element) - expected) <= (element == "F64")


def test_bf16_constants_are_the_upper_halves_of_f32() -> None:
    assert value(MINUS_FOUR, 16, "BF16") == struct.unpack("<I", struct.pack("<f", -4.0))[0] >> 16
    assert value(ONE, 32, "PK2_BF16") == 0x3F80


@pytest.mark.parametrize(
    ("bits", "element", "literal", "expected"),
    [
        (32, "F32", 0x40490FDB, 0x40490FDB),
        (16, "F16", 0x12344248, 0x4248),
        (32, "PK2_F16", 0x12344248, 0x12344248),
        (64, "F64", 0x40080000, 0x4008000000000000),
        (64, "I64", 0xFFFFFFF0, 0xFFFFFFFFFFFFFFF0),
        (64, "I64", 0x7FFFFFF0, 0x7FFFFFF0),
        (64, "U64", 0xFFFFFFF0, 0xFFFFFFF0),
        (64, "B64", 0xFFFFFFF0, 0xFFFFFFF0),
    ],
)
def test_literals_are_widened_as_the_format_says(
    bits: int, element: str, literal: int, expected: int
) -> None:
    assert value(LITERAL, bits, element, literal) == expected


def test_a_constant_stands_for_both_words_of_a_packed_pair() -> None:
    assert value(ONE, 64, "PK2_F32") == 0x3F8000003F800000
    assert value(193, 64, "PK2_F32") == 0xFFFFFFFFFFFFFFFF
    assert value(129, 64, "PK2_B32") == 0x0000000100000001


def test_m0_has_one_number_and_the_null_register_is_nothing() -> None:
    assert scalar(124, 1, CDNA).index == M0
    assert scalar(125, 1, RDNA).index == M0
    assert scalar(124, 1, RDNA) is NOTHING
    assert source(124, None, RDNA) is NOTHING


@pytest.mark.parametrize(
    ("code", "kind"), [(251, OperandKind.VCCZ), (252, OperandKind.EXECZ), (253, OperandKind.SCC)]
)
def test_conditions_are_operands(code: int, kind: OperandKind) -> None:
    assert source(code, None, CDNA).kind is kind


def test_apertures_are_numbered_by_kind_and_end() -> None:
    operands = [source(code, None, CDNA) for code in range(235, 239)]
    assert [(each.kind, each.value) for each in operands] == [(OperandKind.APERTURE, n) for n in range(4)]


def test_masks_have_a_bit_for_each_lane() -> None:
    mask = OperandType(64, "M64", "SREG")
    assert dwords_of(mask, CDNA) == 2
    assert dwords_of(mask, RDNA) == 1
    assert dwords_of(OperandType(16, "F16", "SRC"), RDNA) == 1
    assert dwords_of(None, RDNA) == 1
