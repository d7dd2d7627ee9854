"""LDS: loads and stores against numpy, bytes that nobody wrote, and the cycles that conflicts of banks cost.

Races between waves are tested in test_grid.py, where there are several waves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad.renderer.amd.dsl import EXEC_HI, s, v

from emulated_gpu.chips import CHIPS, Chip
from emulated_gpu_tests.wave.memory_code import (
    CDNA,
    GFX950,
    RDNA3,
    Code,
    DeviceMemory,
    dwords_of,
    registers,
    resource,
)
from emulated_gpu_tests.wave.single_grid import GridResult, run_grid
from emulated_gpu_tests.wave.single_wave import M0
from emulated_gpu_tests.wave.test_global_memory import (
    LOADS,
    ODD_LANES,
    ON_CHIPS,
    STORED_BYTES,
    active,
    expected_load,
    findings,
    new_wave,
    random_bytes,
    scattered,
    set_addresses,
)

SIZE = 8192


@ON_CHIPS
@pytest.mark.parametrize("lanes", [2**64 - 1, ODD_LANES], ids=["all", "odd"])
def test_a_load_gives_the_bytes_at_the_address(chip: Chip, lanes: int) -> None:
    findings()
    code, wave = Code(chip), new_wave(chip, lanes, lds=random_bytes(SIZE))
    offsets = scattered(chip, 2000) // 2 * 4
    wave.v[0] = offsets - 300  # the sum with the constant wraps at 32 bits
    for number, kind in enumerate(LOADS):
        wide = 4 * number if dwords_of(kind) > 1 else number
        code.lds_load(kind, 10 + 4 * number, 0, offset=300 + wide)
    before = wave.v.copy()
    wave.run(chip, code.end())
    for number, kind in enumerate(LOADS):
        wide = 4 * number if dwords_of(kind) > 1 else number
        for lane in active(wave, chip):
            rows = slice(10 + 4 * number, 10 + 4 * number + dwords_of(kind))
            expected = expected_load(wave.lds, int(offsets[lane]) + wide, kind)
            np.testing.assert_array_equal(wave.v[rows, lane], expected, kind)
            before[rows, lane] = expected
    np.testing.assert_array_equal(wave.v, before)
    assert not findings()


@ON_CHIPS
@pytest.mark.parametrize("lanes", [2**64 - 1, ODD_LANES], ids=["all", "odd"])
def test_a_store_writes_its_bytes_only(chip: Chip, lanes: int) -> None:
    findings()
    code, wave = Code(chip), new_wave(chip, lanes, lds=random_bytes(64 * 20 * len(STORED_BYTES) + 8))
    expected = wave.lds.copy()
    for number, (kind, size) in enumerate(STORED_BYTES.items()):
        unaligned = 3 if size < 4 else 0
        offsets = (np.arange(64) + 64 * number) * 20
        wave.v[number] = offsets
        code.lds_store(kind, 40, number, offset=4 + unaligned)
        for lane in active(wave, chip):
            at = int(offsets[lane]) + 4 + unaligned
            expected[at : at + size] = wave.v[40:44, lane].copy().view(np.uint8)[:size]
    wave.run(chip, code.end())
    np.testing.assert_array_equal(wave.lds, expected)
    assert not findings()


@ON_CHIPS
def test_halves_of_registers(chip: Chip) -> None:
    code, wave = Code(chip), new_wave(chip, lds=random_bytes(1024))
    content, old = wave.lds.copy(), wave.v[10:12].copy()
    wave.v[0] = np.arange(64) * 8
    code.lds_load("d16_b16", 10, 0, offset=2)
    code.lds_load("d16_hi_i8", 11, 0, offset=1)
    code.lds_store("d16_hi_b16", 40, 0, offset=4)
    code.lds_store("d16_hi_b8", 41, 0, offset=7)
    wave.run(chip, code.end())
    lane = np.arange(chip.lanes)
    halves = content.view(np.uint16)[lane * 4 + 1].astype(np.uint32)
    np.testing.assert_array_equal(wave.v[10, lane], old[0, lane] & 0xFFFF0000 | halves)
    signed = content.view(np.int8)[lane * 8 + 1].astype(np.int32).astype(np.uint32)
    np.testing.assert_array_equal(wave.v[11, lane], old[1, lane] & 0xFFFF | signed << 16)
    np.testing.assert_array_equal(wave.lds.view(np.uint16)[lane * 4 + 2], wave.v[40, lane] >> 16)
    np.testing.assert_array_equal(wave.lds[lane * 8 + 7], wave.v[41, lane] >> 16 & 0xFF)
    np.testing.assert_array_equal(wave.lds[lane * 8 + 6], content[lane * 8 + 6])


@ON_CHIPS
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("kind", ["b32", "b64"])
def test_pairs_of_elements(chip: Chip, kind: str, strided: bool) -> None:
    findings()
    dwords = dwords_of(kind)
    step = 4 * dwords * (64 if strided else 1)
    code, wave = Code(chip), new_wave(chip, lds=random_bytes(16384))
    addresses = np.arange(64) * (4 * dwords if strided else 64)  # so that no lane overlaps another
    wave.v[0] = wave.v[1] = addresses  # the load overwrites its address
    expected = wave.lds.view(np.uint32).copy()
    data = {"data0": registers(40, dwords), "data1": registers(44, dwords)}
    code.lds_pair("store", kind, data, 0, (2, 7), strided=strided)
    code.wait()
    code.lds_pair("load", kind, {"vdst": registers(1, 2 * dwords)}, 1, (7, 3), strided=strided)
    wave.run(chip, code.end())
    for lane in range(chip.lanes):
        first, second, third = ((addresses[lane] + number * step) // 4 for number in (2, 7, 3))
        expected[first : first + dwords] = wave.v[40 : 40 + dwords, lane]
        expected[second : second + dwords] = wave.v[44 : 44 + dwords, lane]
        loaded = np.concatenate([expected[second : second + dwords], expected[third : third + dwords]])
        np.testing.assert_array_equal(wave.v[1 : 1 + 2 * dwords, lane], loaded)
    np.testing.assert_array_equal(wave.lds.view(np.uint32), expected)
    assert not findings()


@ON_CHIPS
def test_accesses_outside_are_reported(chip: Chip) -> None:
    findings()
    code, wave = Code(chip), new_wave(chip, lds=np.zeros(256, np.uint8))
    wave.v[0] = 0
    wave.v[0, 5] = 249
    code.lds_load("b64", 10, 0)
    code.lds_store("b64", 40, 0)
    code.lds_load("u8", 12, 0, offset=6)  # the last byte
    wave.run(chip, code.end())
    assert wave.v[10, 5] == 0xFFFFFFFF
    assert int(wave.v_defined[10]) == 2**64 - 1 - (1 << 5)
    assert not wave.lds[8:].any()
    assert wave.v[12, 5] == 0
    assert [(f.kind, f.instruction, f.lane, f.address) for f in findings()] == [
        ("outside_lds", "ds_load", 5, 249),
        ("outside_lds", "ds_store", 5, 249),
    ]


@ON_CHIPS
def test_wide_accesses_must_be_aligned_to_a_dword(chip: Chip) -> None:
    findings()
    code, wave = Code(chip), new_wave(chip, lds=random_bytes(1024))
    wave.v[0] = np.arange(64) * 8
    wave.v[0, 3] = 26
    code.lds_load("b64", 10, 0)
    code.lds_load("b32", 12, 0)
    code.lds_store("b96", 40, 0)
    wave.run(chip, code.end())
    assert [(f.kind, f.instruction, f.lane, f.address) for f in findings()] == [
        ("misaligned", "ds_load", 3, 26),
        ("misaligned", "ds_store", 3, 26),
    ]


@ON_CHIPS
def test_an_undefined_address_is_reported(chip: Chip) -> None:
    findings()
    code, wave = Code(chip), new_wave(chip, lds=np.zeros(256, np.uint8))
    wave.v[0] = np.arange(64) * 4
    wave.v_defined[0] ^= np.uint64(1 << 9)
    code.lds_load("b32", 10, 0)
    code.lds_store("b32", 40, 0)
    wave.run(chip, code.end())
    assert wave.v[10, 9] == 0xFFFFFFFF
    assert wave.lds.view(np.uint32)[9] == 0
    found = [(f.kind, f.instruction, f.lane) for f in findings()]
    assert found == [("undefined_address", "ds_load", 9), ("undefined_address", "ds_store", 9)]


@ON_CHIPS
def test_storing_what_is_undefined_makes_bytes_undefined(chip: Chip) -> None:
    findings()
    code, wave = Code(chip), new_wave(chip, lds=np.zeros(1024, np.uint8))
    wave.v[0] = np.arange(64) * 8
    wave.v_defined[40] ^= np.uint64(1 << 7)
    code.lds_store("b16", 40, 0, offset=2)
    code.wait()
    for number, (kind, offset) in enumerate([("b32", 0), ("u16", 0), ("u8", 3), ("b64", 0), ("b32", 4)]):
        code.lds_load(kind, 10 + 2 * number, 0, offset=offset)
    code.lds_store("b32", 41, 0)
    code.wait()
    code.lds_load("b32", 20, 0)
    wave.run(chip, code.end())
    undefined = [not int(wave.v_defined[10 + 2 * number]) >> 7 & 1 for number in range(6)]
    assert undefined == [True, False, True, True, False, False]
    assert not findings()


# ---- loads to LDS
LDS_KINDS = {
    "ubyte": "u8",
    "sbyte": "i8",
    "ushort": "u16",
    "sshort": "i16",
    "dword": "b32",
    "dwordx4": "b128",
}
LDS_CASES = [(CDNA, kind) for kind in LDS_KINDS if kind != "dwordx4"] + [
    (GFX950, "dword"),
    (GFX950, "dwordx4"),
]


@pytest.mark.parametrize(("chip", "kind"), LDS_CASES, ids=lambda each: getattr(each, "name", each))
def test_a_load_to_lds_puts_lane_after_lane(chip: Chip, kind: str) -> None:
    findings()
    memory = DeviceMemory(random_bytes(2048))
    code, wave = Code(chip), new_wave(chip, ODD_LANES, lds=np.zeros(4096, np.uint8))
    offsets = scattered(chip, 2000)
    set_addresses(wave, 0, memory.address + offsets)
    wave.s[M0] = 64
    code.emit(f"global_load_lds_{kind}", addr=v[0], saddr=EXEC_HI, offset=16)
    wave.run(chip, code.end())
    step = dwords_of(LDS_KINDS[kind])
    expected = np.zeros(1024, np.uint32)
    for lane in active(wave, chip):
        first = (64 + 16) // 4 + lane * step
        expected[first : first + step] = expected_load(memory.array, int(offsets[lane]) + 16, LDS_KINDS[kind])
    np.testing.assert_array_equal(wave.lds.view(np.uint32), expected)
    assert not findings()


def test_a_load_to_lds_needs_m0() -> None:
    findings()
    memory = DeviceMemory(np.zeros(64, np.uint32))
    code, wave = Code(CDNA), new_wave(CDNA, lds=np.zeros(256, np.uint8))
    set_addresses(wave, 0, memory.address + np.zeros(64, np.uint64))
    wave.s[M0], wave.s_defined[M0] = 0, 0
    code.emit("global_load_lds_dword", addr=v[0], saddr=EXEC_HI)
    wave.run(CDNA, code.end())
    assert [(f.kind, f.lane) for f in findings()] == [("undefined_address", -1)]


# ---- with the executor: fresh LDS, counters
def run_with_addresses(
    chip: Chip, addresses: np.ndarray, write: Callable[[Code], None], *, waves: int = 1, lds_bytes: int = SIZE
) -> GridResult:
    """Runs what `write` adds with v1 = an address a lane of each wave, from a table in memory."""
    table = DeviceMemory(addresses.astype(np.uint32))
    code = Code(chip)
    words = resource(chip, table.address, addresses.size, stride=4, checks=1)
    for number, word in enumerate(words):
        code.emit("s_mov_b32", s[4 + number], word)
    code.buffer("load", "b32", 1, 0, 4, idxen=1)
    code.wait()
    write(code)
    code.wait()
    return run_grid(chip, code.end(), workgroup=(chip.lanes * waves, 1, 1), lds_bytes=lds_bytes)


@ON_CHIPS
def test_reading_bytes_that_nobody_wrote_is_reported(chip: Chip) -> None:
    def write(code: Code) -> None:
        code.lds_store("b16", 0, 1)
        code.wait()
        code.lds_load("u16", 2, 1)
        code.lds_load("u8", 2, 1, offset=2)
        code.lds_load("b32", 2, 1)

    result = run_with_addresses(chip, np.arange(64) * 4, write)
    assert [(f.kind, f.lane, f.address) for f in result.findings] == [
        ("undefined_lds", 0, 2),
        ("undefined_lds", 0, 0),
    ]


@ON_CHIPS
def test_a_byte_that_is_written_leaves_its_neighbours_unwritten(chip: Chip) -> None:
    def write(code: Code) -> None:
        code.lds_store("b8", 0, 1, offset=1)
        code.wait()
        for offset in range(4):
            code.lds_load("u8", 2, 1, offset=offset)

    result = run_with_addresses(chip, np.arange(64) * 4 + 1024, write)
    assert [(f.kind, f.lane, f.address) for f in result.findings] == [
        ("undefined_lds", 0, 1024),
        ("undefined_lds", 0, 1026),
        ("undefined_lds", 0, 1027),
    ]


def model_of_cycles(chip: Chip, addresses: list[int], size: int, is_load: bool) -> int:
    """Cycles beyond the first of each group of lanes: the most distinct dwords of one of 32 banks."""
    if size <= 4:
        groups = [range(n, n + 32) for n in range(0, chip.lanes, 32)]
    elif size == 8:
        groups = [range(n, n + 16) for n in range(0, chip.lanes, 16)]
    else:
        groups = [range(n, n + 8) for n in range(0, chip.lanes, 8)]
    lanes = [list(group) for group in groups]
    if size > 8 and chip.lanes == 64 and is_load:  # AMD's table for ds_read_b128 on MI300
        half = [[0, 1, 2, 3, 20, 21, 22, 23], [4, 5, 6, 7, 16, 17, 18, 19]]
        half += [[8, 9, 10, 11, 28, 29, 30, 31], [12, 13, 14, 15, 24, 25, 26, 27]]
        lanes = half + [[lane + 32 for lane in group] for group in half]
    total = 0
    for group in lanes:
        dwords = {(addresses[lane] + byte) // 4 for lane in group for byte in range(size)}
        banks = [len([d for d in dwords if d % 32 == bank]) for bank in range(32)]
        total += max(banks) - 1
    return total


PATTERNS: dict[str, Callable[[int], np.ndarray]] = {
    "consecutive": lambda size: np.arange(64) * size,
    "one word": lambda size: np.zeros(64, int),
    "every second bank": lambda size: np.arange(64) * 8,
    "one bank": lambda size: np.arange(64) * 128 % 4096,
    "rows of 36 bytes": lambda size: np.arange(64) * 36,
    "reversed": lambda size: np.arange(64)[::-1] * size,
    "rows of a tile": lambda size: np.arange(64) % 16 * 64 + np.arange(64) // 16 * 16,
}


def access(code: Code, *, kind: str, is_load: bool) -> None:
    if is_load:
        code.lds_load(kind.replace("b8", "u8"), 8, 1)
    else:
        code.lds_store(kind, 8, 1)


@pytest.mark.parametrize("chip", [CDNA, RDNA3], ids=lambda chip: chip.name)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_cycles_of_conflicts(chip: Chip, pattern: str) -> None:
    for kind, size in (("b32", 4), ("b64", 8), ("b128", 16), ("b8", 1)):
        addresses = PATTERNS[pattern](size)
        for is_load in (False, True):
            result = run_with_addresses(chip, addresses, partial(access, kind=kind, is_load=is_load))
            assert result.counters["lds_bytes"] == chip.lanes * size
            expected = model_of_cycles(chip, addresses.tolist(), size, is_load)
            assert result.counters["lds_conflict_cycles"] == expected, kind


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=64, max_size=64), st.sampled_from([4, 8, 16]))
def test_the_cycles_of_any_addresses(words: list[int], size: int) -> None:
    kind = {4: "b32", 8: "b64", 16: "b128"}[size]
    addresses = np.array(words) * 4
    result = run_with_addresses(CDNA, addresses, partial(access, kind=kind, is_load=True))
    assert result.counters["lds_conflict_cycles"] == model_of_cycles(CDNA, addresses.tolist(), size, True)


def test_a_transposing_load_gives_16_lanes_a_column_each() -> None:
    """The word at address a holds a // 2 and a // 2 + 1, and a lane's 4 elements follow those of the last."""
    chip = CHIPS["gfx950"]
    out = DeviceMemory(np.zeros((64, 4), np.uint16))

    def write(code: Code) -> None:
        code.emit("v_lshlrev_b32_e32", v[1], 3, v[0])
        code.emit("v_lshlrev_b32_e32", v[2], 2, v[0])
        for half in range(2):
            code.emit("v_lshlrev_b32_e32", v[4 + half], 16, v[2])
            code.emit("v_or_b32_e32", v[4 + half], v[4 + half], v[2])
            code.emit("v_add_u32_e32", v[4 + half], 0x10000 + 0x20002 * half, v[4 + half])
        code.lds_store("b64", 4, 1)
        code.barrier()
        code.emit("ds_read_b64_tr_b16", vdst=v[6:7], addr=v[1])
        code.wait()
        code.set_scalar64(10, out.address)
        code.store("global", "b64", 6, 1, base=10)

    assert not run_with_addresses(chip, np.zeros(64), write).findings
    matrices = np.arange(4 * 4 * 16).reshape(4, 4, 16)  # of four groups of lanes
    np.testing.assert_array_equal(out.array.reshape(4, 16, 4), matrices.swapaxes(1, 2))
