"""Tests of cross_lane.c against permutations of Python's lists."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tinygrad.renderer.amd.dsl import s, v

from emulated_gpu.chips import Chip
from emulated_gpu_tests.wave.operands import CDNA, CDNA4, RDNA3, RDNA4, all_lanes, elements, encoder, isa, run
from emulated_gpu_tests.wave.single_wave import Wave

M64 = (1 << 64) - 1
CHIPS = pytest.mark.parametrize("chip", [CDNA, RDNA3, RDNA4], ids=lambda chip: chip.name)
RDNA = pytest.mark.parametrize("chip", [RDNA3, RDNA4], ids=lambda chip: chip.name)
RUNNING = 0xF731_8CEF_93A7_0FB5
OLD = 1000


def wave_for(chip: Chip, running: int = M64) -> Wave:
    """v0: numbers of lanes times 7, plus 3; v1: 1000; v2: another permutation of values."""
    wave = Wave()
    wave.set_exec(running & all_lanes(chip))
    wave.v[0] = [7 * n + 3 for n in range(64)]
    wave.v[1] = OLD
    wave.v[2] = [n * n + 10000 for n in range(64)]
    return wave


def scalar(chip: Chip, index: int) -> Any:
    """A scalar destination of a vector instruction, as tinygrad's classes want it."""
    return v[index] if chip.instruction_set == "cdna" else s[index]


def lanes_of(wave: Wave, index: int, chip: Chip) -> list[int]:
    return elements(wave, index, 32)[: chip.lanes]


@CHIPS
def test_one_lane_is_read(chip: Chip) -> None:
    wave = wave_for(chip, 0)
    wave.s[10] = 64 + 5
    wave.v_defined[0] = M64 ^ 1 << 9
    make = encoder(chip, "v_readlane_b32")
    lanes = (7, s[10], 31, 9)
    run(chip, wave, [make(scalar(chip, n), v[0], lane) for n, lane in enumerate(lanes)])
    assert wave.s[:4].tolist() == [7 * n + 3 for n in (7, 5, 31, 9)]
    assert wave.s_defined[:4].tolist() == [1, 1, 1, 0]


@CHIPS
def test_the_number_of_a_lane_wraps(chip: Chip) -> None:
    wave = wave_for(chip)
    wave.s[10] = 33
    run(chip, wave, [encoder(chip, "v_readlane_b32")(scalar(chip, 0), v[0], s[10])])
    assert wave.s[0] == 7 * (33 % chip.lanes) + 3


@CHIPS
def test_the_first_lane_that_runs_is_read(chip: Chip) -> None:
    for running, first in ((all_lanes(chip), 0), (0b11000, 3), (1 << chip.lanes - 1, chip.lanes - 1), (0, 0)):
        wave = wave_for(chip, running)
        wave.v_defined[0] = 1 << first
        run(chip, wave, [isa(chip).v_readfirstlane_b32_e32(scalar(chip, 5), v[0])])
        assert wave.s[5] == 7 * first + 3
        assert wave.s_defined[5] == 1
        wave.v_defined[0] = M64 ^ 1 << first
        run(chip, wave, [isa(chip).v_readfirstlane_b32_e32(scalar(chip, 5), v[0])])
        assert wave.s_defined[5] == 0


@CHIPS
def test_one_lane_is_written_whether_it_runs_or_not(chip: Chip) -> None:
    wave = wave_for(chip, 0b1)
    wave.s[3], wave.s[4] = 77, 64 + 6
    wave.v_defined[1] = 0
    wave.s_defined[5] = 0
    make = encoder(chip, "v_writelane_b32")
    run(chip, wave, [make(v[1], s[3], 2), make(v[1], 5, s[4]), make(v[2], s[5], 3)])
    expected = [OLD] * chip.lanes
    expected[2], expected[6] = 77, 5
    assert lanes_of(wave, 1, chip) == expected
    assert int(wave.v_defined[1]) == 0b1000100
    assert int(wave.v_defined[2]) == M64 ^ 0b1000


def permuted(chip: Chip, running: int, sources: Sequence[int], opsel: int) -> list[int]:
    """The lanes of v1 after v0 was permuted: lane n takes lane `sources[n]`."""
    fetches_inactive, is_bounded = opsel & 1, opsel & 2
    result = [OLD] * chip.lanes
    for lane in range(chip.lanes):
        source = sources[lane]
        if not running >> lane & 1:
            continue
        if fetches_inactive or running >> source & 1:
            result[lane] = 7 * source + 3
        elif is_bounded:
            result[lane] = 0
    return result


@RDNA
@pytest.mark.parametrize("opsel", range(4))
@pytest.mark.parametrize("is_crossed", [False, True])
def test_rows_are_permuted(chip: Chip, opsel: int, is_crossed: bool) -> None:
    rng = random.Random(opsel)
    choices = [rng.randrange(16) for _ in range(16)]
    name = f"v_permlane{'x' * is_crossed}16"
    rows = [lane & ~15 ^ 16 * is_crossed for lane in range(64)]
    for running in (RUNNING, M64, 0xFFFF):
        wave = wave_for(chip, running)
        for n in range(2):
            wave.s[n] = sum(choice << 4 * k for k, choice in enumerate(choices[8 * n : 8 * n + 8]))
        run(chip, wave, [encoder(chip, f"{name}_b32")(v[1], v[0], s[0], s[1], opsel=opsel)])
        sources = [row | choices[lane % 16] for lane, row in enumerate(rows)]
        assert lanes_of(wave, 1, chip) == permuted(chip, running, sources, opsel)
        if chip is not RDNA4:
            continue
        wave = wave_for(chip, running)
        selects = [rng.randrange(1 << 32) for _ in range(64)]
        wave.v[3] = selects
        run(chip, wave, [encoder(chip, f"{name}_var_b32")(v[1], v[0], v[3], opsel=opsel)])
        sources = [row | select % 16 for row, select in zip(rows, selects, strict=True)]
        assert lanes_of(wave, 1, chip) == permuted(chip, running, sources, opsel)


def test_a_permuted_lane_is_as_defined_as_its_source() -> None:
    wave = wave_for(RDNA3)
    wave.v_defined[0] = M64 ^ 0b1
    wave.s[0], wave.s[1] = 0x01234567, 0x89ABCDEF  # lane n takes 7 - n, then 23 - n
    run(RDNA3, wave, [encoder(RDNA3, "v_permlane16_b32")(v[1], v[0], s[0], s[1])])
    assert int(wave.v_defined[1]) & 0xFFFFFFFF == 0xFFFFFFFF ^ 1 << 7


def test_permlane64_does_nothing_in_a_wave_of_32() -> None:
    wave = wave_for(RDNA3)
    run(RDNA3, wave, [isa(RDNA3).v_permlane64_b32_e32(v[1], v[0])])
    assert lanes_of(wave, 1, RDNA3) == [OLD] * 32


@pytest.mark.parametrize("distance", [16, 32])
@pytest.mark.parametrize("opsel", range(4))
@pytest.mark.parametrize("running", [M64, RUNNING])
def test_halves_are_swapped(distance: int, opsel: int, running: int) -> None:
    wave = wave_for(CDNA4, running)
    wave.v_defined[0], wave.v_defined[2] = M64 ^ 0b10, M64 ^ 0b100 << 32
    first, second = elements(wave, 0, 32), elements(wave, 2, 32)
    expected = [list(first), list(second)]
    undefined = [1 << 1, 4 << 32]
    for lane in range(64):
        other, target = lane ^ distance, 0 if lane & distance else 1
        is_read = running >> other & 1 or opsel & 1
        if running >> lane & 1 and (is_read or opsel & 2):
            expected[target][lane] = (second, first)[target][other] if is_read else 0
            source_undefined = (4 << 32, 1 << 1)[target] >> other & 1 if is_read else 0
            undefined[target] = undefined[target] & ~(1 << lane) | source_undefined << lane
    run(CDNA4, wave, [encoder(CDNA4, f"v_permlane{distance}_swap_b32")(v[0], v[2], opsel=opsel)])
    assert [elements(wave, 0, 32), elements(wave, 2, 32)] == expected
    assert [int(wave.v_defined[0]), int(wave.v_defined[2])] == [M64 ^ each for each in undefined]


def exchanged(chip: Chip, name: str, addresses: Sequence[int], running: int, offset: int) -> Wave:
    wave = wave_for(chip, running)
    wave.v[3] = addresses
    fields = {"offset0": offset & 255, "offset1": offset >> 8}
    run(chip, wave, [getattr(isa(chip), name)(vdst=v[1], addr=v[3], data0=v[0], **fields)])
    return wave


@CHIPS
@pytest.mark.parametrize("offset", [0, 8, 0x104])
def test_values_are_pulled_from_lanes(chip: Chip, offset: int) -> None:
    rng = random.Random(offset)
    addresses = [rng.choice((4 * rng.randrange(64), rng.randrange(1 << 32))) for _ in range(64)]
    for running in (M64, RUNNING):
        expected = [OLD] * chip.lanes
        for lane in range(chip.lanes):
            source = (addresses[lane] + offset) // 4 % chip.lanes
            if running >> lane & 1:
                expected[lane] = 7 * source + 3 if running >> source & 1 else 0
        assert lanes_of(exchanged(chip, "ds_bpermute_b32", addresses, running, offset), 1, chip) == expected
        if chip is RDNA4:
            expected = [
                7 * ((addresses[lane] + offset) // 4 % 32) + 3 if running >> lane & 1 else OLD
                for lane in range(32)
            ]
            assert (
                lanes_of(exchanged(chip, "ds_bpermute_fi_b32", addresses, running, offset), 1, chip)
                == expected
            )


@CHIPS
def test_values_are_pushed_to_lanes(chip: Chip) -> None:
    rng = random.Random(1)
    addresses = [rng.choice((4 * rng.randrange(64), rng.randrange(1 << 32))) for _ in range(64)]
    for running in (M64, RUNNING):
        given = [0] * chip.lanes
        for lane in range(chip.lanes):
            if running >> lane & 1:
                given[(addresses[lane] + 12) // 4 % chip.lanes] = 7 * lane + 3
        expected = [given[lane] if running >> lane & 1 else OLD for lane in range(chip.lanes)]
        assert lanes_of(exchanged(chip, "ds_permute_b32", addresses, running, 12), 1, chip) == expected


def test_what_is_exchanged_is_as_defined_as_source_and_address() -> None:
    wave = wave_for(CDNA)
    wave.v[3] = [4 * (63 - n) for n in range(64)]
    wave.v_defined[0], wave.v_defined[3] = M64 ^ 0b1, M64 ^ 0b10
    run(CDNA, wave, [isa(CDNA).ds_bpermute_b32(vdst=v[1], addr=v[3], data0=v[0])])
    assert int(wave.v_defined[1]) == M64 ^ (1 << 63 | 0b10)
    run(CDNA, wave, [isa(CDNA).ds_permute_b32(vdst=v[4], addr=v[3], data0=v[0])])
    assert int(wave.v_defined[4]) == 0  # any lane may have been meant
    wave.v_defined[3] = M64
    run(CDNA, wave, [isa(CDNA).ds_permute_b32(vdst=v[4], addr=v[3], data0=v[0])])
    assert int(wave.v_defined[4]) == M64 ^ 1 << 63


def swizzle_source(lane: int, offset: int) -> int:
    """As the manuals have it under DS_SWIZZLE_B32."""
    half, n = lane & 32, lane & 31
    if offset >= 0xE000:
        mask = offset & 31
        return half | (int(f"{n:05b}"[::-1], 2) >> mask.bit_count() | n & mask)
    if offset >= 0xC000:
        mask, turn = offset & 31, offset >> 5 & 31
        return half | n & mask | (n + (-turn if offset & 0x400 else turn)) % 32 & ~mask & 31
    if offset >= 0x8000:
        return lane & ~3 | offset >> 2 * (lane & 3) & 3
    return half | (n & offset & 31 | offset >> 5 & 31) ^ offset >> 10 & 31


# The bit reversals of five bits, as the manuals print them for offset 0xe000 (from 1 on, in hexadecimal).
FFT_0X00 = "1 11 9 19 5 15 d 1d 3 13 b 1b 7 17 f 1f 2 12 a 1a 6 16 e 1e 4 14 c 1c 8 18 10 20"
FFT_0X10 = "1 9 5 d 3 b 7 f 2 a 6 e 4 c 8 10 11 19 15 1d 13 1b 17 1f 12 1a 16 1e 14 1c 18 20"


@CHIPS
def test_swizzles(chip: Chip) -> None:
    offsets = [
        0x001F,
        0x041F,
        0x7C1F,
        0x0010,
        0x03E0,
        0x2A55,
        0x801B,
        0x80E4,
        0x8055,
        0xC020,
        0xC427,
        0xC3E3,
        0xE010,
        0xE000,
        0xE01F,
        0xE00A,
    ]
    for offset in offsets:
        for running in (M64, RUNNING):
            expected = [OLD] * chip.lanes
            for lane in range(chip.lanes):
                source = swizzle_source(lane, offset)
                if running >> lane & 1:
                    expected[lane] = 7 * source + 3 if running >> source & 1 else 0
            wave = wave_for(chip, running)
            fields: dict[str, Any] = {"offset0": offset & 255, "offset1": offset >> 8}
            run(chip, wave, [isa(chip).ds_swizzle_b32(vdst=v[1], addr=v[0], **fields)])
            assert lanes_of(wave, 1, chip) == expected, hex(offset)


@pytest.mark.parametrize(("offset", "printed"), [(0xE000, FFT_0X00), (0xE010, FFT_0X10)])
def test_swizzles_of_a_fourier_transform_are_those_that_the_manuals_print(offset: int, printed: str) -> None:
    wave = wave_for(RDNA3)
    wave.v[0] = range(64)
    run(
        RDNA3,
        wave,
        [isa(RDNA3).ds_swizzle_b32(vdst=v[1], addr=v[0], offset0=offset & 255, offset1=offset >> 8)],
    )
    assert lanes_of(wave, 1, RDNA3) == [int(each, 16) - 1 for each in printed.split()]
