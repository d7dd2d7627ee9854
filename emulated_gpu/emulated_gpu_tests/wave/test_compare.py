"""Tests of compare.c against Python's comparisons, and against numpy's for floats."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tinygrad.renderer.amd.dsl import s, v

from emulated_gpu.chips import Chip
from emulated_gpu_tests.wave.operands import (
    CDNA,
    EDGES_16,
    EDGES_32,
    EDGES_64,
    RDNA3,
    RDNA4,
    all_lanes,
    carrying_results,
    elements,
    encoder,
    isa,
    random_operands,
    run,
    scalar_value,
    signed,
    vector_results,
)
from emulated_gpu_tests.wave.single_wave import EXEC, VCC, Wave

M64 = (1 << 64) - 1
CHIPS = pytest.mark.parametrize("chip", [CDNA, RDNA3, RDNA4], ids=lambda chip: chip.name)
Relation = Callable[[Any, Any], bool]

INTEGER: dict[str, Relation] = {
    "f": lambda a, b: False,
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ne": lambda a, b: a != b,
    "ge": lambda a, b: a >= b,
    "t": lambda a, b: True,
}


def unordered(a: float, b: float) -> bool:
    return math.isnan(a) or math.isnan(b)


FLOAT: dict[str, Relation] = {
    "f": lambda a, b: False,
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "lg": lambda a, b: not unordered(a, b) and a != b,
    "ge": lambda a, b: a >= b,
    "o": lambda a, b: not unordered(a, b),
    "u": unordered,
    "nge": lambda a, b: unordered(a, b) or a < b,
    "nlg": lambda a, b: unordered(a, b) or a == b,
    "ngt": lambda a, b: unordered(a, b) or a <= b,
    "nle": lambda a, b: unordered(a, b) or a > b,
    "neq": lambda a, b: unordered(a, b) or a != b,
    "nlt": lambda a, b: unordered(a, b) or a >= b,
    "tru t": lambda a, b: True,
}
EXPONENT_BITS = {16: 5, 32: 8, 64: 11}
FORMATS = {16: ("<H", "<e"), 32: ("<I", "<f"), 64: ("<Q", "<d")}


def number(bits: int, width: int) -> float:
    unsigned, kind = FORMATS[width]
    return float(struct.unpack(kind, struct.pack(unsigned, bits))[0])


def float_edges(width: int) -> list[int]:
    """Bits of zeros, denormals, ones, the largest, infinities, quiet and signalling NaN of both signs."""
    mantissa = width - 1 - EXPONENT_BITS[width]
    infinity = (1 << EXPONENT_BITS[width]) - 1 << mantissa
    one = (1 << EXPONENT_BITS[width] - 1) - 1 << mantissa
    positive = [
        0,
        1,
        (1 << mantissa) - 1,
        1 << mantissa,
        one,
        one + 1,
        infinity - 1,
        infinity,
        infinity + 1,
        infinity | 1 << mantissa - 1,
        infinity | (1 << mantissa) - 1,
    ]
    return positive + [each | 1 << width - 1 for each in positive]


def pairs(edges: Sequence[int], width: int) -> list[tuple[int, ...]]:
    return [*((a, b) for a in edges for b in edges), *random_operands([width, width], width, 200)]


def compared(
    chip: Chip, names: Sequence[str], values: Sequence[tuple[int, ...]], widths: Sequence[int], **fields: Any
) -> list[int]:
    make = encoder(chip, *names)

    def encode(_dst: Any, sources: list[Any], _in: Any, out: Any) -> Any:
        return make(out, *sources, **fields)

    return [bit for _, bit in carrying_results(chip, encode, values, widths)]


@CHIPS
@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("name", INTEGER)
def test_integers(chip: Chip, name: str, width: int) -> None:
    if name in "ft" and (chip is RDNA4 or (chip is RDNA3 and width == 16)):
        return  # which have none
    edges = {16: EDGES_16, 32: EDGES_32, 64: EDGES_64}[width]
    values = pairs(edges, width)
    for kind, value in (("u", lambda x, _: x), ("i", signed)):
        expected = [int(INTEGER[name](value(a, width), value(b, width))) for a, b in values]
        assert compared(chip, [f"v_cmp_{name}_{kind}{width}"], values, [width, width]) == expected


@CHIPS
@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("names", FLOAT)
def test_floats(chip: Chip, names: str, width: int) -> None:
    if chip is RDNA4 and names in ("f", "tru t"):
        return  # which has none
    values = pairs(float_edges(width), width)
    expected = [int(FLOAT[names](number(a, width), number(b, width))) for a, b in values]
    mnemonics = [f"v_cmp_{name}_f{width}" for name in names.split()]
    assert compared(chip, mnemonics, values, [width, width]) == expected


@CHIPS
@pytest.mark.parametrize("width", [16, 32, 64])
def test_signs_are_changed_before_floats_are_compared(chip: Chip, width: int) -> None:
    values = pairs(float_edges(width), width)
    for negated in range(4):
        for absolute in range(4):

            def changed(bits: int, source: int) -> float:
                x = abs(number(bits, width)) if absolute >> source & 1 else number(bits, width)  # noqa: B023
                return -x if negated >> source & 1 else x  # noqa: B023

            expected = [int(changed(a, 0) < changed(b, 1)) for a, b in values]
            fields = {"neg": negated, "abs": absolute}
            assert compared(chip, [f"v_cmp_lt_f{width}"], values, [width, width], **fields) == expected


def class_bit(bits: int, width: int) -> int:
    mantissa_bits = width - 1 - EXPONENT_BITS[width]
    x, is_negative = number(bits, width), bool(bits >> width - 1)
    if math.isnan(x):
        return 1 if bits >> mantissa_bits - 1 & 1 else 0
    smallest = 2.0 ** (2 - (1 << EXPONENT_BITS[width] - 1))
    kind = 3 if math.isinf(x) else 0 if x == 0 else 1 if abs(x) < smallest else 2
    return 5 - kind if is_negative else 6 + kind


@CHIPS
@pytest.mark.parametrize("width", [16, 32, 64])
def test_classes_of_floats(chip: Chip, width: int) -> None:
    class_width = 16 if width == 16 else 32
    chosen = [1 << n for n in range(10)] + [0x3FF, 0, 0x155]
    values = [(a, classes) for a in float_edges(width) for classes in chosen]
    expected = [classes >> class_bit(a, width) & 1 for a, classes in values]
    names = [f"v_cmp_class_f{width}"]
    assert compared(chip, names, values, [width, class_width]) == expected
    sign = 1 << width - 1
    for fields, kept, flipped in (
        ({"neg": 1}, sign, sign),
        ({"abs": 1}, 0, 0),
        ({"neg": 1, "abs": 1}, 0, sign),
    ):
        changed = [(a & ~sign | a & kept) ^ flipped for a, _ in values]
        expected = [
            classes >> class_bit(a, width) & 1 for a, (_, classes) in zip(changed, values, strict=True)
        ]
        assert compared(chip, names, values, [width, class_width], **fields) == expected


def test_denormals_are_compared_as_zeros_where_the_mode_says_so() -> None:
    for mode, is_less in ((0xF0, M64), (0xC0, 0)):
        wave = Wave(mode=mode)
        wave.set_exec(M64)
        wave.v[0], wave.v[1], wave.v[2] = 1, 2, 1 << 7 | 1 << 4
        run(
            CDNA,
            wave,
            [
                encoder(CDNA, "v_cmp_lt_f32")(s[0:1], v[0], v[1]),
                encoder(CDNA, "v_cmp_class_f32")(s[2:3], v[0], v[2]),
            ],
        )
        assert scalar_value(wave, 0, 64) == is_less
        assert scalar_value(wave, 2, 64) == M64  # classes are those of what was given


@CHIPS
def test_the_result_has_bits_of_the_lanes_that_run(chip: Chip) -> None:
    wave = Wave()
    running = 0x00FF00FF_00FF00FF & all_lanes(chip)
    wave.set_exec(running)
    wave.s[VCC : VCC + 2] = 0xFFFFFFFF
    run(chip, wave, [isa(chip).v_cmp_eq_u32_e32(v[0], v[0])])
    assert scalar_value(wave, VCC, chip.lanes) == running
    if chip.lanes == 32:
        assert wave.s[VCC + 1] == 0xFFFFFFFF


def test_cmpx_writes_exec_and_on_cdna_the_mask_too() -> None:
    for chip in (CDNA, RDNA3):
        wave = Wave()
        wave.set_exec(0xFF)
        wave.v[0] = range(64)
        wave.s[VCC] = wave.s[10] = 0x12345678
        names = isa(chip)
        long = encoder(chip, "v_cmpx_gt_u32")
        mask = s[10:11] if chip is CDNA else names.EXEC_LO
        run(chip, wave, [names.v_cmpx_lt_u32_e32(3, v[0]), long(mask, 6, v[0])])
        assert scalar_value(wave, EXEC, 64) == 0b0011_0000
        assert wave.s[VCC] == (0b1111_0000 if chip is CDNA else 0x12345678)
        assert wave.s[10] == (0b0011_0000 if chip is CDNA else 0x12345678)


def test_sdwa_compares_parts_of_words() -> None:
    names, wave = isa(CDNA), Wave()
    wave.set_exec(M64)
    wave.v[0] = [(n % 7) << 24 | 0x123456 for n in range(64)]
    wave.v[1] = [n % 5 | 0xFFFFFF00 for n in range(64)]
    run(
        CDNA,
        wave,
        [
            names.VOPC_SDWA_SDST(
                op=names.VOPCOp.V_CMP_LT_U32_E32,
                src0=names.SDWA,
                vsrc1=v[1],
                sdst=s[20:21],
                vsrc0=v[0],
                src0_sel=3,
                src1_sel=0,
                sd=1,
            )
        ],
    )
    assert scalar_value(wave, 20, 64) == sum(1 << n for n in range(64) if n % 7 < n % 5)


def test_dpp_compares_with_another_lane() -> None:
    names, wave = isa(RDNA3), Wave()
    wave.set_exec(0xFFFF00FF)
    wave.v[0] = range(64)
    wave.v[1] = 5
    row_shl_1 = 0x101
    run(
        RDNA3,
        wave,
        [
            names.VOPC_DPP16(
                op=names.VOPCOp.V_CMP_GT_U32_E32,
                src0=names.DPP16,
                vsrc1=v[1],
                vsrc0=v[0],
                dpp=row_shl_1,
                row_mask=15,
                bank_mask=15,
            )
        ],
    )
    takers = [n for n in range(32) if 0xFFFF00FF >> n & 1 and n % 16 < 15 and 0xFFFF00FF >> n + 1 & 1]
    assert wave.s[VCC] == sum(1 << n for n in takers if n + 1 > 5)


@CHIPS
def test_a_lane_takes_the_value_that_its_bit_selects(chip: Chip) -> None:
    values = pairs(EDGES_32, 32)
    masks = [n * 2654435761 >> 11 & 1 for n in range(len(values))]
    make = encoder(chip, "v_cndmask_b32")
    for negated in range(4):
        for absolute in range(4):

            def changed(bits: int, source: int) -> int:
                x = bits & 0x7FFFFFFF if absolute >> source & 1 else bits  # noqa: B023
                return x ^ 1 << 31 if negated >> source & 1 else x  # noqa: B023

            def encode(dst: Any, sources: list[Any], mask: Any, _out: Any) -> Any:
                return make(dst, *sources, mask, neg=negated, abs=absolute)  # noqa: B023

            expected = [
                changed(b, 1) if bit else changed(a, 0) for (a, b), bit in zip(values, masks, strict=True)
            ]
            results = carrying_results(chip, encode, values, [32, 32], carries=masks)
            assert [x for x, _ in results] == expected


@CHIPS
def test_the_short_encoding_selects_by_vcc(chip: Chip) -> None:
    wave = Wave()
    wave.set_exec(all_lanes(chip))
    wave.s[VCC : VCC + 2] = 0x0FF00FF0
    wave.v[0], wave.v[1] = 10, 20
    run(chip, wave, [isa(chip).v_cndmask_b32_e32(v[2], v[0], v[1])])
    expected = [20 if 0x0FF00FF0 >> n % 32 & 1 else 10 for n in range(chip.lanes)]
    assert elements(wave, 2, 32)[: chip.lanes] == expected


def test_a_selected_lane_is_as_defined_as_its_chosen_value() -> None:
    wave = Wave()
    wave.set_exec(M64)
    wave.s[0:2] = 0b1100
    wave.v_defined[0], wave.v_defined[1] = M64 ^ 0b1010, M64 ^ 0b0110
    run(CDNA, wave, [encoder(CDNA, "v_cndmask_b32")(v[2], v[0], v[1], s[0:1])])
    assert int(wave.v_defined[2]) == M64 ^ 0b0110
    wave.s_defined[1] = 0
    run(CDNA, wave, [encoder(CDNA, "v_cndmask_b32")(v[3], v[4], v[5], s[0:1])])
    assert int(wave.v_defined[3]) == 0


@pytest.mark.parametrize("chip", [RDNA3, RDNA4], ids=lambda chip: chip.name)
def test_halves_are_selected(chip: Chip) -> None:
    values = pairs(EDGES_32, 32)
    masks = [n * 2654435761 >> 11 & 1 for n in range(len(values))]
    make, old = encoder(chip, "v_cndmask_b16"), 0xABCD1234
    for opsel in range(16):
        if opsel & 4:
            continue  # the mask has no halves

        def encode(dst: Any, sources: list[Any], mask: Any, _out: Any) -> Any:
            return make(dst, *sources, mask, opsel=opsel, neg=2)  # noqa: B023

        expected = []
        for (a, b), bit in zip(values, masks, strict=True):
            x = (b >> 16 * (opsel >> 1 & 1) ^ 0x8000 if bit else a >> 16 * (opsel & 1)) & 0xFFFF
            expected.append(x << 16 | old & 0xFFFF if opsel & 8 else old & 0xFFFF0000 | x)
        results = carrying_results(chip, encode, values, [32, 32], carries=masks, old=old)
        assert [x for x, _ in results] == expected


def test_a_comparison_with_an_undefined_lane_leaves_the_mask_defined() -> None:
    wave = Wave()
    wave.set_exec(M64)
    wave.v_defined[0] = wave.s_defined[0] = 0
    run(CDNA, wave, [encoder(CDNA, "v_cmp_lt_u32")(s[0:1], v[0], v[1])])
    assert wave.s_defined[:2].all()


def test_vector_results_keeps_the_order_of_values() -> None:
    values = [(n, 0) for n in range(200)]
    assert vector_results(CDNA, encoder(CDNA, "v_or_b32"), values, [32, 32]) == list(range(200))
