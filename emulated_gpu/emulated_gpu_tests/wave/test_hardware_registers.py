"""Tests of hardware_registers.c: the MODE register, and registers numbered by M0."""

from __future__ import annotations

import pytest
from tinygrad.renderer.amd.dsl import s, v

from emulated_gpu.chips import Chip
from emulated_gpu_tests.wave.operands import (
    CDNA,
    RDNA3,
    RDNA4,
    Instruction,
    all_lanes,
    elements,
    encoded,
    encoder,
    isa,
    run,
)
from emulated_gpu_tests.wave.single_wave import M0, Wave

CHIPS = pytest.mark.parametrize("chip", [CDNA, RDNA3, RDNA4], ids=lambda chip: chip.name)
MODE = 1
UNKNOWN_INSTRUCTION = 1  # enum launch_status


def part(number: int, first: int, bits: int) -> int:
    return number | first << 6 | bits - 1 << 11


@CHIPS
def test_parts_of_the_mode_are_written_and_read(chip: Chip) -> None:
    names, wave = isa(chip), Wave(mode=0x2F0)
    wave.s[1] = 0xFFFFFF51
    run(
        chip,
        wave,
        [
            names.s_setreg_imm32_b32(simm16=part(MODE, 4, 2), literal=0),
            names.s_getreg_b32(s[2], part(MODE, 0, 32)),
            names.s_setreg_b32(s[1], part(MODE, 8, 4)),
            names.s_getreg_b32(s[3], part(MODE, 6, 5)),
        ],
    )
    assert wave.s[2] == 0x2C0
    assert wave.mode == 0x1C0
    assert wave.s[3] == 0b00111


@pytest.mark.parametrize("chip", [RDNA3, RDNA4], ids=lambda chip: chip.name)
def test_modes_of_denormals_are_set(chip: Chip) -> None:
    wave = Wave(mode=0x3F0)
    run(chip, wave, [isa(chip).s_denorm_mode(0b1100), isa(chip).s_round_mode(0)])
    assert wave.mode == 0x3C0


@pytest.mark.parametrize(
    "instruction",
    [
        isa(RDNA3).s_round_mode(1),
        isa(RDNA3).s_round_mode(8),
        isa(RDNA3).s_setreg_imm32_b32(simm16=part(MODE, 0, 2), literal=3),
        isa(RDNA3).s_setreg_imm32_b32(simm16=part(2, 4, 2), literal=0),
        isa(RDNA3).s_getreg_b32(s[0], part(2, 0, 32)),
    ],
    ids=["round_f32", "round_f64", "setreg_round", "setreg_status", "getreg_status"],
)
def test_what_is_not_emulated_stops_the_kernel(instruction: Instruction) -> None:
    wave = Wave()
    wave.set_exec(1)
    wave.run(RDNA3, encoded(RDNA3, [instruction, isa(RDNA3).s_mov_b32(s[5], 7)]))
    assert wave.status == UNKNOWN_INSTRUCTION
    assert wave.s[5] == 0
    assert wave.mode == 0xF0


@CHIPS
def test_m0_is_added_to_the_number_of_a_scalar_register(chip: Chip) -> None:
    names, wave = isa(chip), Wave()
    wave.s[:40] = range(100, 140)
    wave.s[M0] = 4
    wave.s_defined[14] = 0
    run(
        chip,
        wave,
        [
            names.s_movrels_b32(s[0], s[10]),
            names.s_movrels_b64(s[2:3], s[20:21]),
            names.s_movreld_b32(s[30], s[20]),
            names.s_movreld_b64(s[36:37], s[22:23]),
        ],
    )
    assert wave.s[[0, 2, 3, 34, 40, 41]].tolist() == [114, 124, 125, 120, 122, 123]
    assert wave.s_defined[[0, 2, 3]].tolist() == [0, 1, 1]


@pytest.mark.parametrize("chip", [RDNA3, RDNA4], ids=lambda chip: chip.name)
def test_m0_is_added_to_the_number_of_a_vector_register(chip: Chip) -> None:
    wave = Wave()
    wave.set_exec(0xFF)
    wave.s[M0] = 3
    wave.v[5], wave.v[2], wave.v[4] = range(64), 11, 12
    run(chip, wave, [encoder(chip, "v_movrels_b32")(v[0], v[2]), encoder(chip, "v_movreld_b32")(v[1], v[2])])
    assert elements(wave, 0, 32)[:10] == [*range(8), 0, 0]
    assert elements(wave, 4, 32)[:10] == [11] * 8 + [12] * 2


@pytest.mark.parametrize(("number", "is_there"), [(95, True), (96, False), (0xFFFFFFF0, False)])
def test_a_register_outside_the_file_stops_the_kernel(number: int, is_there: bool) -> None:
    wave = Wave()
    wave.s[M0], wave.s[105] = number, 17
    wave.run(RDNA3, encoded(RDNA3, [isa(RDNA3).s_movrels_b32(s[0], s[10])]))
    assert (wave.status, wave.s[0]) == ((0, 17) if is_there else (UNKNOWN_INSTRUCTION, 0))


def test_m0_that_is_undefined_makes_the_result_so() -> None:
    wave = Wave()
    wave.set_exec(all_lanes(CDNA))
    wave.s_defined[M0] = 0
    run(CDNA, wave, [isa(CDNA).s_movrels_b32(s[0], s[10])])
    assert not wave.s_defined[0]
