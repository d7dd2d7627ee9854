"""Tests of DPP (dpp.c, and what wave.h does with it) against the permutations that the manuals describe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tinygrad.renderer.amd.dsl import v

from emulated_gpu.chips import Chip
from emulated_gpu_tests.wave.operands import CDNA, RDNA3, RDNA4, all_lanes, elements, isa, run
from emulated_gpu_tests.wave.single_wave import Wave

M64 = (1 << 64) - 1
RUNNING = 0xF731_8CEF_93A7_0FB5
OLD = 9999
Source = Callable[[int], int | None]


def shifted(by: int) -> Source:
    """From `by` lanes further up in the row."""
    return lambda lane: lane + by if 0 <= lane % 16 + by < 16 else None


def in_row(of: Callable[[int], int]) -> Source:
    return lambda lane: lane // 16 * 16 + of(lane % 16)


def rotated(by: int) -> Source:
    return in_row(lambda k: (k - by) % 16)


def shared(number: int) -> Source:
    return in_row(lambda _: number)


def crossed(mask: int) -> Source:
    return in_row(lambda k: k ^ mask)


def in_four(selects: int) -> Source:
    return lambda lane: lane // 4 * 4 + (selects >> 2 * (lane % 4) & 3)


COMMON: dict[int, Source] = {
    **{0x100 + n: shifted(n) for n in range(1, 16)},
    **{0x110 + n: shifted(-n) for n in range(1, 16)},
    **{0x120 + n: rotated(n) for n in range(1, 16)},
    0x140: in_row(lambda k: 15 - k),
    0x141: in_row(lambda k: k // 8 * 8 + 7 - k % 8),
    **{0x150 + n: shared(n) for n in range(16)},
    **{selects: in_four(selects) for selects in (0x00, 0xE4, 0x1B, 0xB1, 0x4E, 0xFF)},
}
ONLY_CDNA: dict[int, Source] = {
    0x130: lambda lane: lane + 1 if lane < 63 else None,
    0x134: lambda lane: (lane + 1) % 64,
    0x138: lambda lane: lane - 1 if lane else None,
    0x13C: lambda lane: (lane - 1) % 64,
    0x142: lambda lane: lane // 16 * 16 - 1 if lane >= 16 else None,
    0x143: lambda lane: lane // 32 * 32 - 1 if lane >= 32 else None,
}
ONLY_RDNA: dict[int, Source] = {0x160 + n: crossed(n) for n in range(16)}


def prepared(chip: Chip, running: int) -> Wave:
    wave = Wave()
    wave.set_exec(running & all_lanes(chip))
    wave.v[0] = [5 * n + 1 for n in range(64)]
    wave.v[1] = OLD
    return wave


def expected(
    chip: Chip, running: int, source: Source, rows: int, banks: int, bounded: bool, fetches: bool = False
) -> list[int]:
    result = [OLD] * chip.lanes
    for lane in range(chip.lanes):
        other = source(lane)
        is_valid = other is not None and other < chip.lanes and (fetches or running >> other & 1)
        is_chosen = rows >> lane // 16 & 1 and banks >> lane // 4 % 4 & 1
        if running >> lane & 1 and is_chosen and (is_valid or bounded):
            result[lane] = 5 * other + 1 if is_valid and other is not None else 0
    return result


def moved(chip: Chip, wave: Wave, **fields: Any) -> list[int]:
    names = isa(chip)
    run(
        chip,
        wave,
        [names.VOP1_DPP16(op=names.VOP1Op.V_MOV_B32_E32, vdst=v[1], src0=names.DPP16, vsrc0=v[0], **fields)],
    )
    return elements(wave, 1, 32)[: chip.lanes]


@pytest.mark.parametrize(
    ("chip", "control"),
    [
        *((CDNA, control) for control in COMMON | ONLY_CDNA),
        *((chip, control) for chip in (RDNA3, RDNA4) for control in COMMON | ONLY_RDNA),
    ],
    ids=lambda each: each.name if isinstance(each, Chip) else hex(each),
)
def test_where_a_value_comes_from(chip: Chip, control: int) -> None:
    source = (COMMON | ONLY_CDNA | ONLY_RDNA)[control]
    for running in (M64, RUNNING):
        for bounded in (False, True):
            wave = prepared(chip, running)
            found = moved(chip, wave, dpp=control, row_mask=15, bank_mask=15, bc=int(bounded))
            assert found == expected(chip, running, source, 15, 15, bounded)


@pytest.mark.parametrize("chip", [CDNA, RDNA3], ids=lambda chip: chip.name)
def test_rows_and_banks_are_chosen(chip: Chip) -> None:
    for rows, banks in ((0b0101, 0b1111), (0b1111, 0b0011), (0b1010, 0b1001), (0, 15)):
        for bounded in (False, True):
            wave = prepared(chip, RUNNING)
            found = moved(chip, wave, dpp=0x111, row_mask=rows, bank_mask=banks, bc=int(bounded))
            assert found == expected(chip, RUNNING, shifted(-1), rows, banks, bounded)


def test_lanes_that_do_not_run_are_fetched_if_asked() -> None:
    for control in (0x101, 0x140, 0x165):
        wave = prepared(RDNA3, RUNNING)
        found = moved(RDNA3, wave, dpp=control, row_mask=15, bank_mask=15, bc=0, fi=1)
        assert found == expected(RDNA3, RUNNING, (COMMON | ONLY_RDNA)[control], 15, 15, False, fetches=True)


@pytest.mark.parametrize("fetches", [False, True])
def test_eight_lanes_are_permuted(fetches: bool) -> None:
    names = isa(RDNA3)
    selects = (7, 0, 6, 1, 1, 5, 2, 3)
    wave = prepared(RDNA3, RUNNING)
    fields = {f"lane_sel_{n}": select for n, select in enumerate(selects)}
    instruction = names.VOP1_DPP8(
        op=names.VOP1Op.V_MOV_B32_E32, vdst=v[1], src0=names.DPP, vsrc0=v[0], **fields
    )
    code = bytearray(instruction.to_bytes())
    code[0] = 234 if fetches else 233  # src0 says whether lanes that do not run are fetched
    wave.run(RDNA3, bytes(code) + names.s_endpgm().to_bytes())
    assert wave.status == 0
    source = lambda lane: lane // 8 * 8 + selects[lane % 8]  # noqa: E731
    assert elements(wave, 1, 32)[:32] == expected(RDNA3, RUNNING, source, 15, 15, True, fetches)


def test_a_lane_is_as_defined_as_the_one_it_takes() -> None:
    wave = prepared(CDNA, M64)
    wave.v_defined[0], wave.v_defined[1] = M64 ^ 0b100, M64 ^ 1
    moved(CDNA, wave, dpp=0x111, row_mask=15, bank_mask=15, bc=0)
    assert int(wave.v_defined[1]) == M64 ^ 0b1001  # lane 0 keeps what it had
    wave.v_defined[1] = 0
    moved(CDNA, wave, dpp=0x111, row_mask=15, bank_mask=15, bc=1)
    assert int(wave.v_defined[1]) == M64 ^ 0b1000


@pytest.mark.parametrize("chip", [CDNA, RDNA3], ids=lambda chip: chip.name)
def test_only_the_first_source_is_permuted(chip: Chip) -> None:
    names, wave = isa(chip), prepared(chip, M64)
    wave.v[2] = [100 * n for n in range(64)]
    op = names.VOP2Op.V_SUB_U32_E32 if chip is CDNA else names.VOP2Op.V_SUB_NC_U32_E32
    instruction = names.VOP2_DPP16(
        op=op, vdst=v[1], src0=names.DPP16, vsrc1=v[2], vsrc0=v[0], dpp=0x140, row_mask=15, bank_mask=15
    )
    run(chip, wave, [instruction])
    mirrored = [5 * (lane // 16 * 16 + 15 - lane % 16) + 1 for lane in range(chip.lanes)]
    assert elements(wave, 1, 32)[: chip.lanes] == [x - 100 * n & 0xFFFFFFFF for n, x in enumerate(mirrored)]
