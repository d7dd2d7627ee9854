"""Tests of scalar.c against Python's integers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tinygrad.renderer.amd.dsl import EXEC, EXEC_LO, s

from emulated_gpu.chips import Chip
from emulated_gpu_tests.wave.operands import (
    CDNA,
    RDNA3,
    RDNA4,
    encoder,
    isa,
    operands,
    random_operands,
    run,
    scalar_results,
    scalar_value,
    set_scalar,
    signed,
)
from emulated_gpu_tests.wave.single_wave import EXEC as EXEC_INDEX
from emulated_gpu_tests.wave.single_wave import Wave

M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
CHIPS = pytest.mark.parametrize("chip", [CDNA, RDNA3, RDNA4], ids=lambda chip: chip.name)
Reference = Callable[..., int]


def first_set(x: int) -> int:
    return (x & -x).bit_length() - 1


def zeros_above(x: int, bits: int) -> int:
    return bits - x.bit_length() if x else -1


def sign_bits(x: int, bits: int) -> int:
    text = f"{x:0{bits}b}"
    same = bits - len(text.lstrip(text[0]))
    return -1 if same == bits else same


def nibbles(x: int, bits: int) -> list[bool]:
    return [bool(x >> 4 * n & 15) for n in range(bits // 4)]


def field(x: int, where: int, bits: int) -> int:
    return x >> where % bits & ((1 << (where >> 16 & 127)) - 1)


def signed_field(x: int, where: int, bits: int) -> int:
    width = min(where >> 16 & 127, bits)
    return signed(signed(x, bits) >> where % bits, width) if width else 0


def both(name: str, reference: Reference) -> dict[str, tuple[list[int], int, Reference]]:
    """The operation on 32 and 64 bits; `reference` is given the width as its last argument."""
    return {
        f"{name}{bits}": (
            [bits] * (reference.__code__.co_argcount - 1),
            bits,
            lambda *x, n=bits: reference(*x, n),
        )
        for bits in (32, 64)
    }


def shifts(name: str, reference: Reference) -> dict[str, tuple[list[int], int, Reference]]:
    return {f"{name}{bits}": ([bits, 32], bits, lambda *x, n=bits: reference(*x, n)) for bits in (32, 64)}


def mask(bits: int) -> int:
    return (1 << bits) - 1


# Name (in CDNA's spelling, then RDNA's): widths of the sources, width of the result, result.
KEEP_SCC: dict[str, tuple[list[int], int, Reference]] = {
    **both("s_mov_b", lambda a, n: a),
    **both("s_brev_b", lambda a, n: int(f"{a:0{n}b}"[::-1], 2)),
    "s_ff1_i32_b32 s_ctz_i32_b32": ([32], 32, first_set),
    "s_ff1_i32_b64 s_ctz_i32_b64": ([64], 32, first_set),
    "s_flbit_i32_b32 s_clz_i32_u32": ([32], 32, lambda a: zeros_above(a, 32)),
    "s_flbit_i32_b64 s_clz_i32_u64": ([64], 32, lambda a: zeros_above(a, 64)),
    "s_flbit_i32 s_cls_i32": ([32], 32, lambda a: sign_bits(a, 32)),
    "s_flbit_i32_i64 s_cls_i32_i64": ([64], 32, lambda a: sign_bits(a, 64)),
    "s_sext_i32_i8": ([32], 32, lambda a: signed(a, 8)),
    "s_sext_i32_i16": ([32], 32, lambda a: signed(a, 16)),
    "s_bitreplicate_b64_b32": ([32], 64, lambda a: int("0" + "".join(2 * bit for bit in f"{a:b}"), 2)),
    "s_bfm_b32": ([32, 32], 32, lambda a, b: mask(a % 32) << b % 32),
    "s_bfm_b64": ([32, 32], 64, lambda a, b: mask(a % 64) << b % 64),
    "s_mul_i32": ([32, 32], 32, lambda a, b: a * b),
    "s_mul_hi_u32": ([32, 32], 32, lambda a, b: a * b >> 32),
    "s_mul_hi_i32": ([32, 32], 32, lambda a, b: signed(a) * signed(b) >> 32),
    "s_pack_ll_b32_b16": ([32, 32], 32, lambda a, b: a & 0xFFFF | b << 16),
    "s_pack_lh_b32_b16": ([32, 32], 32, lambda a, b: a & 0xFFFF | b >> 16 << 16),
    "s_pack_hh_b32_b16": ([32, 32], 32, lambda a, b: a >> 16 | b >> 16 << 16),
}
SCC_TELLS_ZERO: dict[str, tuple[list[int], int, Reference]] = {
    **both("s_not_b", lambda a, n: ~a),
    **both("s_wqm_b", lambda a, n: sum(15 << 4 * k for k, each in enumerate(nibbles(a, n)) if each)),
    **both("s_quadmask_b", lambda a, n: sum(1 << k for k, each in enumerate(nibbles(a, n)) if each)),
    "s_abs_i32": ([32], 32, lambda a: abs(signed(a))),
    "s_bcnt0_i32_b32": ([32], 32, lambda a: 32 - a.bit_count()),
    "s_bcnt0_i32_b64": ([64], 32, lambda a: 64 - a.bit_count()),
    "s_bcnt1_i32_b32": ([32], 32, lambda a: a.bit_count()),
    "s_bcnt1_i32_b64": ([64], 32, lambda a: a.bit_count()),
    **both("s_and_b", lambda a, b, n: a & b),
    **both("s_or_b", lambda a, b, n: a | b),
    **both("s_xor_b", lambda a, b, n: a ^ b),
    **both("s_nand_b", lambda a, b, n: ~(a & b)),
    **both("s_nor_b", lambda a, b, n: ~(a | b)),
    **both("s_xnor_b", lambda a, b, n: ~(a ^ b)),
    "s_andn2_b32 s_and_not1_b32": ([32, 32], 32, lambda a, b: a & ~b),
    "s_andn2_b64 s_and_not1_b64": ([64, 64], 64, lambda a, b: a & ~b),
    "s_orn2_b32 s_or_not1_b32": ([32, 32], 32, lambda a, b: a | ~b),
    "s_orn2_b64 s_or_not1_b64": ([64, 64], 64, lambda a, b: a | ~b),
    **shifts("s_lshl_b", lambda a, b, n: a << b % n),
    **shifts("s_lshr_b", lambda a, b, n: a >> b % n),
    **shifts("s_ashr_i", lambda a, b, n: signed(a, n) >> b % n),
    **shifts("s_bfe_u", field),
    **shifts("s_bfe_i", signed_field),
    "s_absdiff_i32": ([32, 32], 32, lambda a, b: abs(signed(signed(a) - signed(b)))),
}


def carry(x: int) -> int:
    return int(not 0 <= x <= M32)


def overflow(x: int) -> int:
    return int(x != signed(x))


# Result, and SCC, of the sources and the old SCC.
SCC_OF: dict[str, tuple[Reference, Reference]] = {
    "s_add_u32 s_add_co_u32": (lambda a, b, c: a + b, lambda a, b, c: carry(a + b)),
    "s_sub_u32 s_sub_co_u32": (lambda a, b, c: a - b, lambda a, b, c: carry(a - b)),
    "s_addc_u32 s_add_co_ci_u32": (lambda a, b, c: a + b + c, lambda a, b, c: carry(a + b + c)),
    "s_subb_u32 s_sub_co_ci_u32": (lambda a, b, c: a - b - c, lambda a, b, c: carry(a - b - c)),
    "s_add_i32 s_add_co_i32": (lambda a, b, c: a + b, lambda a, b, c: overflow(signed(a) + signed(b))),
    "s_sub_i32 s_sub_co_i32": (lambda a, b, c: a - b, lambda a, b, c: overflow(signed(a) - signed(b))),
    "s_min_u32": (lambda a, b, c: min(a, b), lambda a, b, c: a < b),
    "s_max_u32": (lambda a, b, c: max(a, b), lambda a, b, c: a >= b),
    "s_min_i32": (lambda a, b, c: min(signed(a), signed(b)), lambda a, b, c: signed(a) < signed(b)),
    "s_max_i32": (lambda a, b, c: max(signed(a), signed(b)), lambda a, b, c: signed(a) >= signed(b)),
    "s_lshl1_add_u32": (lambda a, b, c: 2 * a + b, lambda a, b, c: carry(2 * a + b)),
    "s_lshl2_add_u32": (lambda a, b, c: 4 * a + b, lambda a, b, c: carry(4 * a + b)),
    "s_lshl3_add_u32": (lambda a, b, c: 8 * a + b, lambda a, b, c: carry(8 * a + b)),
    "s_lshl4_add_u32": (lambda a, b, c: 16 * a + b, lambda a, b, c: carry(16 * a + b)),
    "s_cselect_b32": (lambda a, b, c: a if c else b, lambda a, b, c: c),
}
COMPARISONS: dict[str, Reference] = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}


def with_equals(widths: list[int], seed: int, num_random: int = 40) -> list[tuple[int, ...]]:
    """Operands, among them equal ones, complements, and those whose bit fields have every kind of width."""
    values = operands(widths, seed, num_random, fewer_edges=len(widths) == 2)
    if len(widths) == 2:
        values += [(a, a & mask(widths[1])) for a, _ in values[-20:]]
        values += [(a, ~a & mask(widths[1])) for a, _ in values[-20:]]
        fields = [
            (offset, width) for offset in (0, 5, 31, 40, 63) for width in (0, 1, 7, 31, 32, 33, 63, 64, 100)
        ]
        values += [(a, width << 16 | offset) for a, _ in values[-3:] for offset, width in fields]
    return values


@CHIPS
@pytest.mark.parametrize("names", [*KEEP_SCC, *SCC_TELLS_ZERO])
def test_results_and_whether_they_are_zero(chip: Chip, names: str) -> None:
    widths, bits, reference = (KEEP_SCC | SCC_TELLS_ZERO)[names]
    values = with_equals(widths, seed=1)
    sccs = [n % 2 for n in range(len(values))]
    results = scalar_results(chip, encoder(chip, *names.split()), values, widths, bits, sccs=sccs)
    for each, scc, result in zip(values, sccs, results, strict=True):
        expected = reference(*each) & mask(bits)
        assert result == (expected, scc if names in KEEP_SCC else int(expected != 0)), each


@CHIPS
@pytest.mark.parametrize("names", SCC_OF)
def test_arithmetic_sets_scc(chip: Chip, names: str) -> None:
    value, flag = SCC_OF[names]
    values = with_equals([32, 32], seed=2)
    sccs = [n * 2654435761 >> 9 & 1 for n in range(len(values))]
    results = scalar_results(chip, encoder(chip, *names.split()), values, [32, 32], sccs=sccs)
    for (a, b), scc, result in zip(values, sccs, results, strict=True):
        assert result == (value(a, b, scc) & M32, int(flag(a, b, scc))), (a, b, scc)


@CHIPS
def test_comparisons(chip: Chip) -> None:
    values = with_equals([32, 32], seed=3)
    for name, reference in COMPARISONS.items():
        for kind, number in (("u32", int), ("i32", signed)):
            make = encoder(chip, f"s_cmp_{name}_{kind}")
            results = scalar_results(chip, lambda _, a, b, m=make: m(a, b), values, [32, 32])
            assert [scc for _, scc in results] == [int(reference(number(a), number(b))) for a, b in values]


@CHIPS
def test_comparisons_with_immediates(chip: Chip) -> None:
    values = [(a,) for a in (0, 1, 5, 0x7FFF, 0x8000, 0xFFFF, 0xFFFF8000, 0xFFFFFFFF, 0x80000000)]
    if chip is RDNA4:  # which has none
        return
    for name, reference in COMPARISONS.items():
        for immediate in (0, 5, 0x7FFF, 0x8000, 0xFFFF):
            for kind, number, other in (("u32", int, immediate), ("i32", signed, signed(immediate, 16))):
                make = getattr(isa(chip), f"s_cmpk_{name}_{kind}", None)
                if make is None:
                    continue
                results = scalar_results(chip, lambda _, a, m=make, i=immediate: m(a, i), values, [32])
                assert [scc for _, scc in results] == [int(reference(number(a), other)) for (a,) in values]


@CHIPS
def test_comparisons_of_64_bits_and_of_single_bits(chip: Chip) -> None:
    values = with_equals([64, 64], seed=4) + [(a, a ^ 1 << n) for a, n in ((5, 0), (7, 31), (9, 32), (1, 63))]
    for name, reference in (("eq", COMPARISONS["eq"]), ("lg", COMPARISONS["lg"])):
        make = encoder(chip, f"s_cmp_{name}_u64")
        results = scalar_results(chip, lambda _, a, b, m=make: m(a, b), values, [64, 64])
        assert [scc for _, scc in results] == [int(reference(a, b)) for a, b in values]
    for bits in (32, 64):
        tested = with_equals([bits, 32], seed=5)
        for wanted in (0, 1):
            make = encoder(chip, f"s_bitcmp{wanted}_b{bits}")
            results = scalar_results(chip, lambda _, a, b, m=make: m(a, b), tested, [bits, 32])
            assert [scc for _, scc in results] == [int(a >> b % bits & 1 == wanted) for a, b in tested]


def test_64_bit_arithmetic_of_rdna4() -> None:
    values = with_equals([64, 64], seed=6)
    references: dict[str, Reference] = {
        "s_add_nc_u64": lambda a, b: a + b,
        "s_sub_nc_u64": lambda a, b: a - b,
        "s_mul_u64": lambda a, b: a * b,
    }
    for name, reference in references.items():
        results = scalar_results(RDNA4, encoder(RDNA4, name), values, [64, 64], 64, sccs=[1] * len(values))
        assert results == [(reference(a, b) & M64, 1) for a, b in values]


def test_operations_that_one_generation_has() -> None:
    values = with_equals([32], seed=7)
    for bits in (32, 64):
        results = scalar_results(CDNA, encoder(CDNA, f"s_ff0_i32_b{bits}"), values, [bits])
        assert [x for x, _ in results] == [first_set(~a & mask(bits)) & M32 for (a,) in values]
    pairs = with_equals([32, 32], seed=8)
    results = scalar_results(RDNA3, encoder(RDNA3, "s_pack_hl_b32_b16"), pairs, [32, 32])
    assert [x for x, _ in results] == [a >> 16 | (b & 0xFFFF) << 16 for a, b in pairs]


@CHIPS
def test_immediates_are_signed(chip: Chip) -> None:
    references: dict[str, Reference] = {
        "s_movk_i32": lambda old, k: k,
        "s_addk_i32 s_addk_co_i32": lambda old, k: old + k,
        "s_mulk_i32": lambda old, k: old * k,
    }
    for immediate in (0, 1, 0x7FFF, 0x8000, 0xFFFE):
        value = signed(immediate, 16)
        for names, reference in references.items():
            make = encoder(chip, *names.split())
            for old in (5, 0x7FFFFFFF, 0x80000001):
                ((result, _),) = scalar_results(
                    chip, lambda dst, m=make, i=immediate: m(dst, i), [()], [], old=old
                )
                assert result == reference(old, value) & M32


@CHIPS
@pytest.mark.parametrize("scc", [0, 1])
def test_a_move_depends_on_scc(chip: Chip, scc: int) -> None:
    for bits, value, old in ((32, 77, 5), (64, 77 << 32 | 1, 5 << 32 | 2)):
        make = encoder(chip, f"s_cmov_b{bits}")
        expected = [(value if scc else old, scc)]
        assert scalar_results(chip, make, [(value,)], [bits], bits, sccs=[scc], old=old) == expected
    results = scalar_results(
        chip, lambda dst: isa(chip).s_cmovk_i32(dst, 0x8001), [()], [], sccs=[scc], old=9
    )
    assert results == [(0xFFFF8001 if scc else 9, scc)]
    chosen = scalar_results(
        chip, encoder(chip, "s_cselect_b64"), [(1 << 40, 1 << 50)], [64, 64], 64, sccs=[scc]
    )
    assert chosen == [(1 << (40 if scc else 50), scc)]


@CHIPS
def test_single_bits_are_set(chip: Chip) -> None:
    for bits in (32, 64):
        for value in (0, 1):
            for old in (0, mask(bits), 0x123456789ABCDEF0 & mask(bits)):
                positions = [(n,) for n in (0, 1, 31, 32, 63, 64, 100)]
                results = scalar_results(
                    chip,
                    encoder(chip, f"s_bitset{value}_b{bits}"),
                    positions,
                    [32],
                    bits,
                    sccs=[1] * 7,
                    old=old,
                )
                for (n,), result in zip(positions, results, strict=True):
                    bit = 1 << n % bits
                    assert result == (old | bit if value else old & ~bit, 1)


SAVES: dict[str, Reference] = {
    "s_and_saveexec": lambda a, e: a & e,
    "s_or_saveexec": lambda a, e: a | e,
    "s_xor_saveexec": lambda a, e: a ^ e,
    "s_nand_saveexec": lambda a, e: ~(a & e),
    "s_nor_saveexec": lambda a, e: ~(a | e),
    "s_xnor_saveexec": lambda a, e: ~(a ^ e),
    "s_andn2_saveexec s_and_not1_saveexec": lambda a, e: a & ~e,
    "s_orn2_saveexec s_or_not1_saveexec": lambda a, e: a | ~e,
    "s_andn1_saveexec s_and_not0_saveexec": lambda a, e: ~a & e,
    "s_orn1_saveexec s_or_not0_saveexec": lambda a, e: ~a | e,
    "s_andn1_wrexec s_and_not0_wrexec": lambda a, e: ~a & e,
    "s_andn2_wrexec s_and_not1_wrexec": lambda a, e: a & ~e,
}


@CHIPS
@pytest.mark.parametrize("names", SAVES)
def test_exec_is_changed(chip: Chip, names: str) -> None:
    for bits in (64,) if chip is CDNA else (32, 64):
        make = encoder(chip, *(f"{name}_b{bits}" for name in names.split()))
        values = [
            *random_operands([bits, bits], 9, 5),
            (mask(bits), mask(bits)),
            (0, 0),
            (mask(bits), 0),
            (0, mask(bits)),
        ]
        for a, old in values:
            wave = Wave()
            set_scalar(wave, EXEC_INDEX, 64, 0xDEADBEEF << 32 | 5)
            set_scalar(wave, EXEC_INDEX, bits, old)
            set_scalar(wave, 0, bits, a)
            run(chip, wave, [make(s[4] if bits == 32 else s[4:5], s[0] if bits == 32 else s[0:1])])
            expected = SAVES[names](a, old) & mask(bits)
            assert scalar_value(wave, EXEC_INDEX, bits) == expected
            assert scalar_value(wave, 4, bits) == (expected if "wrexec" in names else old)
            assert wave.scc == int(expected != 0)
            if bits == 32:
                assert wave.s[EXEC_INDEX + 1] == 0xDEADBEEF


def test_exec_can_be_moved_and_compared() -> None:
    wave = Wave()
    wave.set_exec(0x1234)
    names = isa(CDNA)
    run(
        CDNA,
        wave,
        [names.s_mov_b64(s[0:1], EXEC), names.s_mov_b32(EXEC_LO, 7), names.s_cmp_lg_u64(EXEC, s[0:1])],
    )
    assert scalar_value(wave, 0, 64) == 0x1234
    assert scalar_value(wave, EXEC_INDEX, 64) == 7
    assert wave.scc == 1


@CHIPS
def test_a_result_is_defined_if_what_it_depends_on_is(chip: Chip) -> None:
    names = isa(chip)
    wave = Wave()
    wave.s_defined[1] = wave.s_defined[11] = 0
    instructions = [
        encoder(chip, "s_add_u32", "s_add_co_u32")(s[20], s[0], s[1]),
        names.s_cselect_b32(s[21], s[0], s[2]),  # SCC comes from the sum
        names.s_cmp_eq_u32(s[0], s[0]),
        names.s_cselect_b32(s[22], s[0], s[1]),
        names.s_cselect_b32(s[23], s[1], s[0]),
        names.s_mov_b64(s[24:25], s[10:11]),
        names.s_mov_b32(s[26], s[10]),
        names.s_cselect_b64(s[28:29], s[12:13], s[10:11]),
    ]
    run(chip, wave, instructions)
    assert wave.s_defined[20:30].tolist() == [0, 0, 1, 0, 0, 0, 1, 1, 1, 1]  # s27 was never written
