"""Tests of vector_integer.c against Python's integers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from tinygrad.renderer.amd.dsl import s, v

from emulated_gpu.chips import Chip
from emulated_gpu_tests.wave.operands import (
    CDNA,
    CDNA4,
    EDGES_32,
    RDNA3,
    RDNA4,
    all_lanes,
    carrying_results,
    elements,
    encoder,
    isa,
    operands,
    random_operands,
    run,
    signed,
    vector_results,
)
from emulated_gpu_tests.wave.single_wave import VCC, Wave

M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
Reference = Callable[..., int]


def clamped(x: int, low: int, high: int) -> int:
    return max(low, min(high, x))


def unsigned(x: int) -> int:
    return clamped(x, 0, M32)


def within(x: int) -> int:
    return clamped(x, -(1 << 31), (1 << 31) - 1)


def leading_zeros(x: int) -> int:
    return 32 - x.bit_length() if x else M32


def trailing_zeros(x: int) -> int:
    return (x & -x).bit_length() - 1 if x else M32


def sign_bits(x: int) -> int:
    """How many of the upper bits equal the sign, or -1 if all do."""
    text = f"{x:032b}"
    same = len(text) - len(text.lstrip(text[0]))
    return M32 if same == 32 else same


def field(x: int, offset: int, width: int) -> int:
    return x >> (offset & 31) & ((1 << (width & 31)) - 1)


def signed_field(x: int, offset: int, width: int) -> int:
    width &= 31
    return signed(signed(x) >> (offset & 31), width) if width else 0


def u24(x: int) -> int:
    return x & 0xFFFFFF


def i24(x: int) -> int:
    return signed(x, 24)


def s32(function: Callable[..., int]) -> Reference:
    """A function of signed values."""
    return lambda *values: function(*map(signed, values))


UNARY: dict[str, Reference] = {
    "v_mov_b32": lambda a: a,
    "v_not_b32": lambda a: M32 - a,
    "v_bfrev_b32": lambda a: int(f"{a:032b}"[::-1], 2),
    "v_ffbh_u32 v_clz_i32_u32": leading_zeros,
    "v_ffbl_b32 v_ctz_i32_b32": trailing_zeros,
    "v_ffbh_i32 v_cls_i32": sign_bits,
}
BINARY: dict[str, Reference] = {
    "v_and_b32": lambda a, b: a & b,
    "v_or_b32": lambda a, b: a | b,
    "v_xor_b32": lambda a, b: a ^ b,
    "v_xnor_b32": lambda a, b: ~(a ^ b),
    "v_lshlrev_b32": lambda a, b: b << (a % 32),
    "v_lshrrev_b32": lambda a, b: b >> (a % 32),
    "v_ashrrev_i32": lambda a, b: signed(b) >> (a % 32),
    "v_mul_lo_u32": lambda a, b: a * b,
    "v_mul_hi_u32": lambda a, b: a * b >> 32,
    "v_mul_hi_i32": lambda a, b: signed(a) * signed(b) >> 32,
    "v_mul_u32_u24": lambda a, b: u24(a) * u24(b),
    "v_mul_hi_u32_u24": lambda a, b: u24(a) * u24(b) >> 32,
    "v_mul_i32_i24": lambda a, b: i24(a) * i24(b),
    "v_mul_hi_i32_i24": lambda a, b: i24(a) * i24(b) >> 32,
    "v_min_u32": min,
    "v_max_u32": max,
    "v_min_i32": s32(min),
    "v_max_i32": s32(max),
    "v_bfm_b32": lambda a, b: ((1 << a % 32) - 1) << b % 32,
    "v_bcnt_u32_b32": lambda a, b: a.bit_count() + b,
    "v_add_u32 v_add_nc_u32": lambda a, b: a + b,
    "v_sub_u32 v_sub_nc_u32": lambda a, b: a - b,
    "v_subrev_u32 v_subrev_nc_u32": lambda a, b: b - a,
    "v_add_i32 v_add_nc_i32": lambda a, b: a + b,
    "v_sub_i32 v_sub_nc_i32": lambda a, b: a - b,
}
TERNARY: dict[str, Reference] = {
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_lshl_add_u32": lambda a, b, c: (a << b % 32) + c,
    "v_add_lshl_u32": lambda a, b, c: (a + b) << c % 32,
    "v_lshl_or_b32": lambda a, b, c: a << b % 32 | c,
    "v_and_or_b32": lambda a, b, c: a & b | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_bfi_b32": lambda a, b, c: a & b | ~a & c,
    "v_bfe_u32": field,
    "v_bfe_i32": signed_field,
    "v_alignbit_b32": lambda a, b, c: (a << 32 | b) >> c % 32,
    "v_alignbyte_b32": lambda a, b, c: (a << 32 | b) >> c % 4 * 8,
    "v_min3_u32": min,
    "v_max3_u32": max,
    "v_med3_u32": lambda *values: sorted(values)[1],
    "v_min3_i32": s32(min),
    "v_max3_i32": s32(max),
    "v_med3_i32": s32(lambda *values: sorted(values)[1]),
    "v_mad_u32_u24": lambda a, b, c: u24(a) * u24(b) + c,
    "v_mad_i32_i24": lambda a, b, c: i24(a) * i24(b) + c,
    "v_mad_u32_u16": lambda a, b, c: (a & 0xFFFF) * (b & 0xFFFF) + c,
    "v_mad_i32_i16": lambda a, b, c: signed(a, 16) * signed(b, 16) + c,
}
RDNA_TERNARY: dict[str, Reference] = {
    "v_xor3_b32": lambda a, b, c: a ^ b ^ c,
    "v_maxmin_u32": lambda a, b, c: min(max(a, b), c),
    "v_minmax_u32": lambda a, b, c: max(min(a, b), c),
    "v_maxmin_i32": s32(lambda a, b, c: min(max(a, b), c)),
    "v_minmax_i32": s32(lambda a, b, c: max(min(a, b), c)),
}
CLAMPED: dict[str, Reference] = {
    "v_add_u32 v_add_nc_u32": lambda a, b: unsigned(a + b),
    "v_sub_u32 v_sub_nc_u32": lambda a, b: unsigned(a - b),
    "v_subrev_u32 v_subrev_nc_u32": lambda a, b: unsigned(b - a),
    "v_add_i32 v_add_nc_i32": s32(lambda a, b: within(a + b)),
    "v_sub_i32 v_sub_nc_i32": s32(lambda a, b: within(a - b)),
    "v_mad_u32_u24": lambda a, b, c: unsigned(u24(a) * u24(b) + c),
    "v_mad_i32_i24": lambda a, b, c: within(i24(a) * i24(b) + signed(c)),
    "v_mad_u32_u16": lambda a, b, c: unsigned((a & 0xFFFF) * (b & 0xFFFF) + c),
    "v_mad_i32_i16": lambda a, b, c: within(signed(a, 16) * signed(b, 16) + signed(c)),
}
CARRYING: dict[str, Reference] = {
    "v_add_co_u32": lambda a, b, c: a + b,
    "v_sub_co_u32": lambda a, b, c: a - b,
    "v_subrev_co_u32": lambda a, b, c: b - a,
    "v_addc_co_u32 v_add_co_ci_u32": lambda a, b, c: a + b + c,
    "v_subb_co_u32 v_sub_co_ci_u32": lambda a, b, c: a - b - c,
    "v_subbrev_co_u32 v_subrev_co_ci_u32": lambda a, b, c: b - a - c,
}
CHIPS = pytest.mark.parametrize("chip", [CDNA, RDNA3, RDNA4], ids=lambda chip: chip.name)


def check(chip: Chip, names: str, reference: Reference, num_sources: int, **fields: Any) -> None:
    values = operands([32] * num_sources, seed=num_sources)
    make = encoder(chip, *names.split())
    results = vector_results(chip, lambda *registers: make(*registers, **fields), values, [32] * num_sources)
    assert results == [reference(*each) & M32 for each in values]


@CHIPS
@pytest.mark.parametrize("names", UNARY)
def test_operations_with_one_source(chip: Chip, names: str) -> None:
    check(chip, names, UNARY[names], 1)


@CHIPS
@pytest.mark.parametrize("names", BINARY)
def test_operations_with_two_sources(chip: Chip, names: str) -> None:
    check(chip, names, BINARY[names], 2)


@CHIPS
@pytest.mark.parametrize("names", TERNARY)
def test_operations_with_three_sources(chip: Chip, names: str) -> None:
    check(chip, names, TERNARY[names], 3)


@pytest.mark.parametrize("chip", [RDNA3, RDNA4], ids=lambda chip: chip.name)
@pytest.mark.parametrize("names", RDNA_TERNARY)
def test_operations_that_only_rdna_has(chip: Chip, names: str) -> None:
    check(chip, names, RDNA_TERNARY[names], 3)


@CHIPS
@pytest.mark.parametrize("names", CLAMPED)
def test_clamping_takes_the_exact_result_to_the_nearest_that_fits(chip: Chip, names: str) -> None:
    check(chip, names, CLAMPED[names], 3 if "mad" in names else 2, clmp=1)


@CHIPS
@pytest.mark.parametrize("clamp", [0, 1])
@pytest.mark.parametrize("names", CARRYING)
def test_carries(chip: Chip, names: str, clamp: int) -> None:
    values = operands([32, 32], seed=7)
    carries = [n * 2654435761 >> 7 & 1 for n in range(len(values))]
    make = encoder(chip, *names.split())
    reads_carry = "_co_ci_" in names

    def encode(dst: Any, sources: list[Any], carry_in: Any, carry_out: Any) -> Any:
        return make(dst, carry_out, *sources, *[carry_in] * reads_carry, clmp=clamp)

    exact = [CARRYING[names](*each, carry) for each, carry in zip(values, carries, strict=True)]
    expected = [((unsigned(x) if clamp else x & M32), int(not 0 <= x <= M32)) for x in exact]
    assert carrying_results(chip, encode, values, [32, 32], carries=carries) == expected


def test_a_carry_goes_through_vcc_in_the_short_encoding() -> None:
    wave = Wave()
    wave.set_exec((1 << 64) - 1)
    wave.v[0], wave.v[1] = M32, np.arange(64)
    wave.s[VCC : VCC + 2] = 0x0F0F0F0F
    names = isa(CDNA)
    run(CDNA, wave, [names.v_addc_co_u32_e32(v[2], v[0], v[1]), names.v_subbrev_co_u32_e32(v[3], v[1], v[0])])
    carries = [0x0F0F0F0F >> lane % 32 & 1 for lane in range(64)]
    sums = [M32 + lane + carry for lane, carry in enumerate(carries)]
    borrowed = [M32 - lane - (total >> 32) for lane, total in enumerate(sums)]
    assert elements(wave, 2, 32) == [total & M32 for total in sums]
    assert elements(wave, 3, 32) == [each & M32 for each in borrowed]
    assert not wave.s[VCC : VCC + 2].any()


def test_a_carry_is_written_for_the_lanes_that_run() -> None:
    wave = Wave()
    wave.set_exec(0x5555)
    wave.v[0] = wave.v[1] = M32
    wave.s[10:12] = M32
    run(CDNA, wave, [encoder(CDNA, "v_add_co_u32")(v[2], s[10:11], v[0], v[1])])
    assert wave.s[10] == 0x5555
    assert wave.s[11] == 0


@CHIPS
def test_lanes_that_do_not_run_keep_their_value(chip: Chip) -> None:
    wave = Wave()
    wave.set_exec(0xF0F0F0F0_0F0F0F0F & all_lanes(chip))
    wave.v[0], wave.v[1], wave.v[2] = np.arange(64), 100, 7
    run(chip, wave, [isa(chip).v_or_b32_e32(v[2], v[0], v[1])])
    running = 0xF0F0F0F0_0F0F0F0F & all_lanes(chip)
    assert elements(wave, 2, 32) == [lane | 100 if running >> lane & 1 else 7 for lane in range(64)]


@CHIPS
def test_a_lane_is_defined_if_its_sources_are(chip: Chip) -> None:
    wave = Wave()
    wave.set_exec(all_lanes(chip) & ~1)
    wave.v_defined[0], wave.v_defined[1], wave.v_defined[2] = M64 ^ 0b0110, M64 ^ 0b0100, M64 ^ 0b0001
    run(chip, wave, [isa(chip).v_xor_b32_e32(v[2], v[0], v[1])])
    assert int(wave.v_defined[2]) == M64 ^ 0b0111


def test_bits_below_a_lane_are_counted() -> None:
    for chip in (CDNA, RDNA3):
        masks = [*EDGES_32, *(x for (x,) in random_operands([32], 3, 20))]
        for name, first_lane in (("v_mbcnt_lo_u32_b32", 0), ("v_mbcnt_hi_u32_b32", 32)):
            wave = Wave()
            wave.set_exec(all_lanes(chip))
            wave.v[200] = 1000
            wave.s[: len(masks)] = masks
            make = encoder(chip, name)
            run(chip, wave, [make(v[n], s[n], v[200]) for n in range(len(masks))])
            for n, mask in enumerate(masks):
                below = [(1 << max(0, min(32, lane - first_lane))) - 1 for lane in range(chip.lanes)]
                expected = [1000 + (mask & each).bit_count() for each in below]
                assert elements(wave, n, 32)[: chip.lanes] == expected


def test_bitop3_looks_each_bit_up_in_its_truth_table() -> None:
    values = operands([32, 32, 32], seed=5, num_random=100)
    make = encoder(CDNA4, "v_bitop3_b32")
    for table in (0x00, 0x01, 0x02, 0x04, 0x08, 0x10, 0x20, 0x40, 0x80, 0xE8, 0x96, 0xCA, 0xFF):
        fields = {"omod": table >> 6, "abs": table >> 3 & 7, "neg": table & 7}
        results = vector_results(CDNA4, partial(make, **fields), values, [32, 32, 32])
        for (a, b, c), result in zip(values, results, strict=True):
            bits = [table >> (4 * (a >> n & 1) + 2 * (b >> n & 1) + (c >> n & 1)) & 1 for n in range(32)]
            assert result == sum(bit << n for n, bit in enumerate(bits))


def test_the_random_generator_steps() -> None:
    values = operands([32], seed=6)
    results = vector_results(CDNA4, encoder(CDNA4, "v_prng_b32"), values, [32])
    assert results == [(a << 1 ^ (197 if a >= 1 << 31 else 0)) & M32 for (a,) in values]


def test_halves_of_words_are_multiplied() -> None:
    values = operands([32, 32, 32], seed=8, num_random=100)
    make = encoder(RDNA3, "v_mad_u32_u16")
    for opsel in range(4):
        results = vector_results(RDNA3, partial(make, opsel=opsel), values, [32, 32, 32])
        for (a, b, c), result in zip(values, results, strict=True):
            factors = (a >> 16 * (opsel & 1) & 0xFFFF, b >> 16 * (opsel >> 1) & 0xFFFF)
            assert result == (factors[0] * factors[1] + c) & M32


@CHIPS
def test_registers_are_swapped_in_the_lanes_that_run(chip: Chip) -> None:
    wave = Wave()
    wave.set_exec(0xFF)
    wave.v[3], wave.v[4] = np.arange(64), np.arange(64) + 100
    wave.v_defined[3], wave.v_defined[4] = 0b0011, M64 ^ 0b0101
    run(chip, wave, [isa(chip).v_swap_b32_e32(v[3], v[4])])
    lanes = range(64)
    assert elements(wave, 3, 32) == [lane + 100 if lane < 8 else lane for lane in lanes]
    assert elements(wave, 4, 32) == [lane if lane < 8 else lane + 100 for lane in lanes]
    assert int(wave.v_defined[3]) == 0b11111010
    assert int(wave.v_defined[4]) == M64 & ~0xFF | 0b0011


SELECTIONS = {0: (0, 8), 1: (8, 8), 2: (16, 8), 3: (24, 8), 4: (0, 16), 5: (16, 16), 6: (0, 32)}


@pytest.mark.parametrize("extends", [0, 1])
def test_sdwa_reads_parts_of_words(extends: int) -> None:
    names = isa(CDNA)
    values = operands([32, 32], seed=9, num_random=50)
    for first, (shift0, bits0) in SELECTIONS.items():
        for second, (shift1, bits1) in SELECTIONS.items():
            make = lambda dst, a, b, i=first, j=second: names.VOP2_SDWA(  # noqa: E731
                op=names.VOP2Op.V_ADD_U32_E32,
                vdst=dst,
                src0=names.SDWA,
                vsrc1=b,
                vsrc0=a,
                dst_sel=6,
                src0_sel=i,
                src1_sel=j,
                src0_sext=extends,
                src1_sext=extends,
            )
            extend = signed if extends else lambda x, bits: x & ((1 << bits) - 1)
            expected = [extend(a >> shift0, bits0) + extend(b >> shift1, bits1) & M32 for a, b in values]
            assert vector_results(CDNA, make, values, [32, 32]) == expected


def test_sdwa_writes_parts_of_words() -> None:
    names = isa(CDNA)
    values, old = operands([32, 32], seed=10, num_random=50), 0xA5B6C7D8
    for select, (shift, bits) in SELECTIONS.items():
        for unused in range(3):
            make = lambda dst, a, b, i=select, u=unused: names.VOP2_SDWA(  # noqa: E731
                op=names.VOP2Op.V_ADD_U32_E32,
                vdst=dst,
                src0=names.SDWA,
                vsrc1=b,
                vsrc0=a,
                dst_sel=i,
                dst_unused=u,
                src0_sel=6,
                src1_sel=6,
            )
            mask = ((1 << bits) - 1) << shift
            results = vector_results(CDNA, make, values, [32, 32], old=old)
            for (a, b), result in zip(values, results, strict=True):
                part = (a + b) << shift & mask
                above = signed(a + b, bits) << shift & M32
                assert result == (part, above, part | old & ~mask & M32)[unused]


def test_scalars_and_constants_are_read_in_every_lane() -> None:
    for chip in (CDNA, RDNA3):
        wave = Wave()
        wave.set_exec(all_lanes(chip))
        wave.s[5] = 0x12345678
        wave.v[0] = np.arange(64)
        make = encoder(chip, "v_add_u32", "v_add_nc_u32")
        run(
            chip,
            wave,
            [make(v[1], s[5], v[0]), make(v[2], 17, v[0]), make(v[3], -16, v[0]), make(v[4], 0.5, v[0])],
        )
        for number, constant in ((1, 0x12345678), (2, 17), (3, -16), (4, 0x3F000000)):
            expected = [constant + lane & M32 for lane in range(chip.lanes)]
            assert elements(wave, number, 32)[: chip.lanes] == expected
