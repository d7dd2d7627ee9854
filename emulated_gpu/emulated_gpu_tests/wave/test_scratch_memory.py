"""Scratch: memory of each lane, and which of its bytes are defined."""

from __future__ import annotations

import numpy as np
import pytest
from tinygrad.renderer.amd.dsl import EXEC_LO

from emulated_gpu.chips import Chip
from emulated_gpu_tests.wave.memory_code import Code, dwords_of
from emulated_gpu_tests.wave.test_global_memory import (
    LOADS,
    ODD_LANES,
    ON_CHIPS,
    STORED_BYTES,
    active,
    expected_load,
    findings,
    new_wave,
)

SIZE = 160  # bytes of a lane


@ON_CHIPS
@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("unaligned", [0, 1, 2, 3])
def test_lanes_have_memory_of_their_own(chip: Chip, uniform: bool, unaligned: int) -> None:
    findings()
    code, wave = Code(chip), new_wave(chip, ODD_LANES | 0xF0)
    offsets = np.full(64, 8) if uniform else np.random.default_rng(3).integers(0, 16, 64)
    wave.v[0] = offsets + unaligned
    wave.s[20] = 64
    memory = np.zeros((64, SIZE), np.uint8)
    for start in range(0, SIZE, 16):
        code.store("scratch", "b128", 36, 1, offset=start)
    wave.v[1] = 0
    wave.v[36:40] = 0
    for number, (kind, size) in enumerate(STORED_BYTES.items()):
        code.store("scratch", kind, 40 + number, 0, base=20, offset=8 * number - 4)
        for lane in active(wave, chip):
            at = 64 + offsets[lane] + unaligned + 8 * number - 4
            memory[lane, at : at + size] = (
                wave.v[40 + number : 44 + number, lane].copy().view(np.uint8)[:size]
            )
    for number, kind in enumerate(LOADS):
        code.load("scratch", kind, 100 + 4 * number, 0, offset=number + 60)
    before = wave.v.copy()
    wave.run(chip, code.end(), scratch_bytes=SIZE)
    for number, kind in enumerate(LOADS):
        for lane in active(wave, chip):
            at = int(offsets[lane]) + unaligned + number + 60
            rows = slice(100 + 4 * number, 100 + 4 * number + dwords_of(kind))
            np.testing.assert_array_equal(wave.v[rows, lane], expected_load(memory[lane], at, kind), kind)
            before[rows, lane] = wave.v[rows, lane]
    np.testing.assert_array_equal(wave.v, before)
    assert not findings()


@ON_CHIPS
@pytest.mark.parametrize("spread", [0, 4], ids=["uniform", "spread"])
def test_bytes_are_undefined_until_a_defined_value_is_stored(chip: Chip, spread: int) -> None:
    findings()
    code, wave = Code(chip), new_wave(chip, 0xFFFF)
    wave.v[0] = np.arange(64) * spread
    wave.v_defined[40] = np.uint64(2**64 - 1 - (1 << 3))
    code.store("scratch", "b32", 40, 0)  # undefined in lane 3
    code.store("scratch", "b16", 41, 0, offset=4)  # the upper half stays undefined
    code.load("scratch", "b32", 10, 0)
    code.load("scratch", "u16", 11, 0, offset=4)
    code.load("scratch", "b32", 12, 0, offset=4)
    code.load("scratch", "b64", 13, 0)
    code.load("scratch", "u8", 15, 0, offset=6)
    code.store("scratch", "b32", 42, 0)
    code.load("scratch", "b32", 16, 0)
    wave.run(chip, code.end(), scratch_bytes=512)
    lanes = wave.v_defined[10:17] & np.uint64(0xFFFF)
    np.testing.assert_array_equal(lanes, [0xFFF7, 0xFFFF, 0, 0xFFF7, 0, 0, 0xFFFF])
    np.testing.assert_array_equal(wave.v[11, :16], wave.v[41, :16] & 0xFFFF)
    assert (wave.v[15, :16] == 0xFF).all()
    assert (wave.v[12, :16] >> 16 == 0xFFFF).all()
    if not spread:
        assert wave.v[10, 3] == 0xFFFFFFFF
    assert not findings()


@ON_CHIPS
@pytest.mark.parametrize("spread", [0, 4], ids=["uniform", "spread"])
def test_an_undefined_value_makes_its_own_lane_undefined(chip: Chip, spread: int) -> None:
    code, wave = Code(chip), new_wave(chip, 0xFFFF)
    wave.v[0] = np.arange(64) % 2 * spread
    wave.v_defined[40] = np.uint64(2**64 - 1 - (1 << 3))
    code.store("scratch", "b32", 41, 0)
    code.store("scratch", "b32", 40, 0)
    code.load("scratch", "b32", 10, 0)
    wave.run(chip, code.end(), scratch_bytes=64)
    assert int(wave.v_defined[10]) & 0xFFFF == 0xFFF7
    np.testing.assert_array_equal(wave.v[10, [0, 1, 2, 4, 15]], wave.v[40, [0, 1, 2, 4, 15]])


@ON_CHIPS
def test_only_the_lanes_that_store_become_defined(chip: Chip) -> None:
    code, wave = Code(chip), new_wave(chip, 0x00FF)
    wave.v[0] = 0
    code.store("scratch", "b64", 40, 0)
    code.emit("s_mov_b32", EXEC_LO, 0xFFFF)
    code.load("scratch", "b64", 10, 0)
    wave.run(chip, code.end(), scratch_bytes=64)
    np.testing.assert_array_equal(wave.v_defined[10:12] & np.uint64(0xFFFF), [0xFF, 0xFF])
    np.testing.assert_array_equal(wave.v[10:12, :8], wave.v[40:42, :8])
    assert (wave.v[10:12, 8:16] == 0xFFFFFFFF).all()


@ON_CHIPS
def test_an_access_outside_scratch_is_reported(chip: Chip) -> None:
    findings()
    code, wave = Code(chip), new_wave(chip)
    wave.v[0] = 0
    wave.v[0, 6] = 4 * 16 - 3
    wave.v[1] = wave.v[40] = 7
    code.store("scratch", "b32", 40, 0)
    code.load("scratch", "b32", 10, 0)
    code.load("scratch", "b128", 12, 0, offset=-4)
    wave.run(chip, code.end(), scratch_bytes=64)
    assert wave.v[10, 6] == 0xFFFFFFFF
    assert wave.v[10, 5] == 7
    assert wave.v_defined[10] == np.uint64(2**64 - 1 - 64)
    assert [(f.kind, f.instruction, f.lane, f.address) for f in findings()] == [
        ("outside_scratch", "scratch_store", 6, 61),
        ("outside_scratch", "scratch_load", 6, 61),
        ("outside_scratch", "scratch_load", 0, 2**32 - 4),
    ]


@ON_CHIPS
@pytest.mark.parametrize("what", ["vector", "scalar"])
def test_an_undefined_address_is_reported(chip: Chip, what: str) -> None:
    findings()
    code, wave = Code(chip), new_wave(chip)
    wave.v[0], wave.s[20] = 0, 0
    if what == "vector":
        wave.v_defined[0] ^= np.uint64(1 << 2)
    else:
        wave.s_defined[20] = 0
    code.load("scratch", "b32", 10, 0, base=20)
    wave.run(chip, code.end(), scratch_bytes=64)
    assert [(f.kind, f.lane) for f in findings()] == [("undefined_address", 2 if what == "vector" else 0)]


@ON_CHIPS
def test_a_spill_of_several_registers_keeps_which_of_them_are_defined(chip: Chip) -> None:
    findings()
    code, wave = Code(chip), new_wave(chip, 0xFFFF)
    wave.v[0] = 0
    wave.v_defined[41] = np.uint64(0)
    code.store("scratch", "b64", 40, 0)
    code.load("scratch", "b64", 10, 0)
    wave.run(chip, code.end(), scratch_bytes=512)
    np.testing.assert_array_equal(wave.v_defined[10:12] & np.uint64(0xFFFF), [0xFFFF, 0])
    np.testing.assert_array_equal(wave.v[10, :16], wave.v[40, :16])
    assert not findings()
