"""Scalar loads, global and flat accesses: against numpy views of the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from emulated_gpu.chips import Chip
from emulated_gpu.control import Finding
from emulated_gpu_tests.devices import loaded
from emulated_gpu_tests.wave.memory_code import ALL_CHIPS, CDNA, RDNA4, Code, DeviceMemory, dwords_of
from emulated_gpu_tests.wave.single_wave import Wave

LOADS = {
    "u8": np.uint8,
    "i8": np.int8,
    "u16": np.uint16,
    "i16": np.int16,
    "b32": np.uint32,
    "b64": np.uint32,
    "b96": np.uint32,
    "b128": np.uint32,
}
STORED_BYTES = {"b8": 1, "b16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16}
ON_CHIPS = pytest.mark.parametrize("chip", ALL_CHIPS, ids=lambda chip: chip.name)
SHARED, PRIVATE = 1 << 48, 2 << 48  # apertures
ODD_LANES = 0xAAAAAAAAAAAAAAAA


def new_wave(chip: Chip, lanes: int = 2**64 - 1, **fields: Any) -> Wave:
    """A wave whose registers all hold a pattern."""
    wave = Wave(**fields)
    wave.v[:] = np.arange(wave.v.size, dtype=np.uint32).reshape(wave.v.shape) * np.uint32(2654435761)
    wave.set_exec(lanes & (2**chip.lanes - 1))
    return wave


def active(wave: Wave, chip: Chip) -> np.ndarray:
    mask = int(wave.s[126]) | int(wave.s[127]) << 32
    return np.array([lane for lane in range(chip.lanes) if mask >> lane & 1])


def set_addresses(wave: Wave, register: int, addresses: np.ndarray) -> None:
    """Puts 64 bits a lane into two VGPRs."""
    wave.v[register] = addresses & 0xFFFFFFFF
    wave.v[register + 1] = addresses >> 32


def random_bytes(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)


def scattered(chip: Chip, size: int, seed: int = 1) -> np.ndarray:
    """Unaligned offsets, some of them equal, as 64 lanes of uint64."""
    return np.random.default_rng(seed).integers(0, size, 64).astype(np.uint64)


def findings() -> tuple[Finding, ...]:
    """The findings since the last call."""
    control = loaded()
    found = control.report().findings
    control.clear_report()
    return found


def expected_load(content: np.ndarray, offset: int, kind: str) -> np.ndarray:
    """The dwords that a load of `kind` gives."""
    dtype = np.dtype(LOADS[kind])
    count = dwords_of(kind)
    raw = np.frombuffer(content.tobytes()[offset : offset + count * dtype.itemsize], dtype)
    return np.asarray(raw.astype(np.int64) & 0xFFFFFFFF, np.uint32)


@ON_CHIPS
@pytest.mark.parametrize("lanes", [2**64 - 1, ODD_LANES, 1], ids=["all", "odd", "one"])
@pytest.mark.parametrize("space", ["global", "flat"])
def test_a_load_gives_the_bytes_at_the_address(chip: Chip, lanes: int, space: str) -> None:
    findings()
    memory = DeviceMemory(random_bytes(4096))
    code, wave = Code(chip), new_wave(chip, lanes)
    offsets = scattered(chip, 4000)
    set_addresses(wave, 0, memory.address + offsets)
    for number, kind in enumerate(LOADS):
        code.load(space, kind, 10 + 4 * number, 0, offset=number)
    before = wave.v.copy()
    wave.run(chip, code.end())
    for number, kind in enumerate(LOADS):
        for lane in active(wave, chip):
            at = int(offsets[lane]) + number
            loaded = wave.v[10 + 4 * number : 10 + 4 * number + dwords_of(kind), lane]
            np.testing.assert_array_equal(loaded, expected_load(memory.array, at, kind), kind)
            before[10 + 4 * number : 10 + 4 * number + dwords_of(kind), lane] = loaded
    np.testing.assert_array_equal(wave.v, before)  # nothing else has changed
    assert not findings()


@ON_CHIPS
@pytest.mark.parametrize("offset", [-24, 0, 4000])
def test_a_scalar_base_takes_an_unsigned_offset_of_32_bits_and_a_constant(chip: Chip, offset: int) -> None:
    memory = DeviceMemory(random_bytes(8192))
    code, wave = Code(chip), new_wave(chip)
    base = memory.address + 100 - 0x8000_0000
    wave.s[20:22] = base & 0xFFFFFFFF, base >> 32
    offsets = scattered(chip, 4000)
    wave.v[0] = 0x8000_0000 + offsets
    code.load("global", "b32", 10, 0, base=20, offset=offset)
    wave.run(chip, code.end())
    for lane in range(chip.lanes):
        at = int(offsets[lane]) + 100 + offset
        assert wave.v[10, lane] == expected_load(memory.array, at, "b32")[0]


@ON_CHIPS
def test_a_negative_constant_is_added_to_64_bits(chip: Chip) -> None:
    memory = DeviceMemory(random_bytes(1024))
    code, wave = Code(chip), new_wave(chip)
    set_addresses(wave, 0, memory.address + np.arange(64, dtype=np.uint64) * 8 + 16)
    code.load("global", "b64", 10, 0, offset=-16)
    wave.run(chip, code.end())
    expected = memory.array[:512].view(np.uint32).reshape(64, 2).T[:, : chip.lanes]
    np.testing.assert_array_equal(wave.v[10:12, : chip.lanes], expected)


@ON_CHIPS
def test_a_load_of_16_bits_keeps_the_other_half(chip: Chip) -> None:
    memory = DeviceMemory(random_bytes(256))
    code, wave = Code(chip), new_wave(chip)
    offsets = scattered(chip, 200)
    set_addresses(wave, 0, memory.address + offsets)
    kinds = ["d16_u8", "d16_i8", "d16_b16", "d16_hi_u8", "d16_hi_i8", "d16_hi_b16"]
    before = wave.v.copy()
    for number, kind in enumerate(kinds):
        code.load("global", kind, 10 + number, 0)
    wave.run(chip, code.end())
    for number, kind in enumerate(kinds):
        plain = {"b16": "u16"}.get(kind.rpartition("_")[2], kind.rpartition("_")[2])
        for lane in range(chip.lanes):
            value = int(expected_load(memory.array, int(offsets[lane]), plain)[0]) & 0xFFFF
            old = int(before[10 + number, lane])
            merged = value << 16 | old & 0xFFFF if "hi" in kind else old & 0xFFFF0000 | value
            assert int(wave.v[10 + number, lane]) == merged, kind


@ON_CHIPS
@pytest.mark.parametrize("lanes", [2**64 - 1, ODD_LANES], ids=["all", "odd"])
@pytest.mark.parametrize("space", ["global", "flat"])
def test_a_store_writes_its_bytes_only(chip: Chip, lanes: int, space: str) -> None:
    findings()
    memory = DeviceMemory(random_bytes(64 * 17 * len(STORED_BYTES)))
    expected = memory.array.copy()
    code, wave = Code(chip), new_wave(chip, lanes)
    for number, (kind, size) in enumerate(STORED_BYTES.items()):
        offsets = (np.arange(64, dtype=np.uint64) + 64 * number) * 17  # apart, and unaligned
        set_addresses(wave, 2 * number, memory.address + offsets)
        code.store(space, kind, 40, 2 * number)
        for lane in active(wave, chip):
            at = int(offsets[lane])
            expected[at : at + size] = wave.v[40:44, lane].copy().view(np.uint8)[:size]
    wave.run(chip, code.end())
    np.testing.assert_array_equal(memory.array, expected)
    assert not findings()


@ON_CHIPS
def test_a_store_of_the_upper_half(chip: Chip) -> None:
    memory = DeviceMemory(np.zeros(256, np.uint8))
    code, wave = Code(chip), new_wave(chip)
    set_addresses(wave, 0, memory.address + np.arange(64, dtype=np.uint64) * 4)
    code.store("global", "d16_hi_b16", 40, 0)
    code.store("global", "d16_hi_b8", 40, 0, offset=3)
    wave.run(chip, code.end())
    halves = wave.v[40, : chip.lanes] >> 16
    expected = (halves | (halves & 0xFF) << 24).astype(np.uint32)
    np.testing.assert_array_equal(memory.array.view(np.uint32)[: chip.lanes], expected)


@ON_CHIPS
def test_a_load_outside_memory_gives_poison_and_is_reported(chip: Chip) -> None:
    findings()
    memory = DeviceMemory(np.arange(64, dtype=np.uint32))
    code, wave = Code(chip), new_wave(chip)
    addresses = memory.address + np.arange(64, dtype=np.uint64) * 4
    addresses[5] = memory.address + 256 - 3  # the last byte is outside
    addresses[9] = memory.address - 1
    set_addresses(wave, 0, addresses)
    code.load("global", "b32", 10, 0)
    code.load("global", "u8", 11, 0, offset=3)
    code.load("global", "d16_b16", 12, 0, offset=2)
    low_half = wave.v[12, 5] & 0xFFFF0000
    wave.run(chip, code.end())
    inside = [lane for lane in range(chip.lanes) if lane not in (5, 9)]
    np.testing.assert_array_equal(wave.v[10, inside], inside)
    assert wave.v[10, 5] == wave.v[10, 9] == 0xFFFFFFFF
    assert wave.v[11, 5] == 0xFF
    assert wave.v[11, 9] == 0
    assert wave.v[12, 5] == low_half | 0xFFFF
    assert [int(~wave.v_defined[10 + n] & np.uint64(2**chip.lanes - 1)) for n in range(3)] == [
        *(1 << 5 | 1 << 9, 1 << 5, 1 << 5),
    ]
    found = findings()
    assert [(f.kind, f.instruction, f.lane) for f in found] == [("outside_memory", "global_load", 5)] * 3
    assert found[0].address == memory.address + 253
    size = (len(code.code) - 4) // 3  # of an instruction; s_endpgm has 4 bytes
    assert [f.code_address for f in found] == [0, size, 2 * size]


@ON_CHIPS
def test_a_store_outside_memory_is_dropped_and_reported(chip: Chip) -> None:
    findings()
    memory = DeviceMemory(np.zeros(64, np.uint32))
    code, wave = Code(chip), new_wave(chip)
    addresses = memory.address + np.arange(64, dtype=np.uint64) * 4
    addresses[7] = memory.address + 254
    set_addresses(wave, 0, addresses)
    wave.v[40] = 1
    code.store("global", "b32", 40, 0)
    wave.run(chip, code.end())
    expected = np.where((np.arange(64) < chip.lanes) & (np.arange(64) != 7), 1, 0)
    np.testing.assert_array_equal(memory.array, expected)
    assert [(f.kind, f.lane, f.address) for f in findings()] == [("outside_memory", 7, memory.address + 254)]


@ON_CHIPS
def test_lanes_may_use_several_allocations(chip: Chip) -> None:
    findings()
    first, second = DeviceMemory(np.full(64, 1, np.uint32)), DeviceMemory(np.full(64, 2, np.uint32))
    code, wave = Code(chip), new_wave(chip)
    set_addresses(wave, 0, np.where(np.arange(64) % 2, first.address, second.address).astype(np.uint64))
    code.load("global", "b32", 10, 0)
    wave.run(chip, code.end())
    np.testing.assert_array_equal(wave.v[10, : chip.lanes], 2 - np.arange(chip.lanes) % 2)
    assert not findings()


@ON_CHIPS
@pytest.mark.parametrize("register", [0, 1], ids=["low", "high"])
def test_an_undefined_address_is_reported_and_makes_the_result_undefined(chip: Chip, register: int) -> None:
    findings()
    memory = DeviceMemory(np.arange(64, dtype=np.uint32))
    code, wave = Code(chip), new_wave(chip, ~(1 << 4))
    set_addresses(wave, 0, memory.address + np.arange(64, dtype=np.uint64) * 4)
    wave.v_defined[register] ^= np.uint64(1 << 6 | 1 << 4)  # lane 4 does not run
    code.load("global", "b32", 10, 0)
    code.store("global", "b32", 40, 0)
    wave.run(chip, code.end())
    assert wave.v[10, 6] == 0xFFFFFFFF
    assert wave.v_defined[10] == np.uint64(2**64 - 1 - (1 << 6))
    assert memory.array[6] == 6
    assert memory.array[5] == wave.v[40, 5]
    assert [(f.kind, f.instruction, f.lane) for f in findings()] == [
        *(("undefined_address", "global_load", 6), ("undefined_address", "global_store", 6)),
    ]


@ON_CHIPS
def test_storing_what_is_undefined_is_reported(chip: Chip) -> None:
    findings()
    memory = DeviceMemory(np.zeros(256, np.uint32))
    code, wave = Code(chip), new_wave(chip, ~(1 << 4))
    set_addresses(wave, 0, memory.address + np.arange(64, dtype=np.uint64) * 16)
    wave.v_defined[42] ^= np.uint64(1 << 9 | 1 << 4)
    code.store("global", "b64", 40, 0)
    code.store("global", "b96", 40, 0)
    wave.run(chip, code.end())
    found = [(f.kind, f.lane, f.address) for f in findings()]
    assert found == [("undefined_stored", 9, memory.address + 9 * 16)]
    assert memory.array[9 * 4 + 2] == wave.v[42, 9]


@ON_CHIPS
def test_a_flat_address_names_lds_scratch_or_memory(chip: Chip) -> None:
    findings()
    memory = DeviceMemory(np.arange(64, dtype=np.uint32) + 1000)
    code = Code(chip)
    wave = new_wave(chip, lds=(np.arange(64, dtype=np.uint32) + 2000).view(np.uint8).copy())
    at = np.arange(64, dtype=np.uint64)
    bases = np.array([memory.address, SHARED, PRIVATE], np.uint64)
    set_addresses(wave, 0, bases[np.arange(64) % 3] + at // 3 * 4)
    set_addresses(wave, 2, PRIVATE + at // 3 * 4)
    wave.v[40] = at + 3000
    wave.v[41] = at + 5000
    code.store("flat", "b32", 40, 2)
    code.load("flat", "b32", 10, 0)
    code.store("flat", "b32", 41, 0)
    code.load("flat", "b32", 11, 0)
    wave.run(chip, code.end(), scratch_bytes=96)
    lane = np.arange(chip.lanes)
    expected = np.choose(lane % 3, [1000 + lane // 3, 2000 + lane // 3, 3000 + lane])
    np.testing.assert_array_equal(wave.v[10, : chip.lanes], expected)
    np.testing.assert_array_equal(wave.v[11, : chip.lanes], lane + 5000)
    np.testing.assert_array_equal(memory.array[lane[lane % 3 == 0] // 3], lane[lane % 3 == 0] + 5000)
    np.testing.assert_array_equal(
        wave.lds.view(np.uint32)[lane[lane % 3 == 1] // 3], lane[lane % 3 == 1] + 5000
    )
    assert not findings()


# ---- scalar loads
@ON_CHIPS
@pytest.mark.parametrize("kind", ["b32", "b64", "b128", "b256", "b512"])
def test_a_scalar_load_gives_whole_dwords(chip: Chip, kind: str) -> None:
    findings()
    memory = DeviceMemory(np.arange(100, dtype=np.uint32) * 7)
    code, wave = Code(chip), new_wave(chip)
    base = memory.address + 43  # the lowest two bits of the sum are ignored
    wave.s[4:6], wave.s[6] = [base & 0xFFFFFFFF, base >> 32], 32
    code.scalar_load(kind, 16, 4, offset=-3 if chip is CDNA else 5, register=6)
    before = wave.s.copy()
    wave.run(chip, code.end())
    first = (43 + 32 + (-3 if chip is CDNA else 5)) // 4
    before[16 : 16 + dwords_of(kind)] = (first + np.arange(dwords_of(kind))) * 7
    np.testing.assert_array_equal(wave.s, before)
    assert not findings()


@pytest.mark.parametrize(
    ("kind", "value"), [("u8", 0x81), ("i8", 0xFFFFFF81), ("u16", 0x8281), ("i16", 0xFFFF8281)]
)
def test_a_scalar_load_of_less_than_a_dword(kind: str, value: int) -> None:
    memory = DeviceMemory(np.array([0, 0x81, 0x82, 0x83], np.uint8))
    code, wave = Code(RDNA4), new_wave(RDNA4)
    wave.s[4:6] = memory.address & 0xFFFFFFFF, memory.address >> 32
    code.scalar_load(kind, 16, 4, offset=1)
    wave.run(RDNA4, code.end())
    assert wave.s[16] == value


@ON_CHIPS
def test_a_scalar_load_outside_memory_is_reported(chip: Chip) -> None:
    findings()
    memory = DeviceMemory(np.zeros(4, np.uint32))
    code, wave = Code(chip), new_wave(chip)
    wave.s[4:6] = memory.address & 0xFFFFFFFF, memory.address >> 32
    code.scalar_load("b128", 16, 4, offset=4)
    wave.run(chip, code.end())
    np.testing.assert_array_equal(wave.s[16:20], [0xFFFFFFFF] * 4)
    assert not wave.s_defined[16:20].any()
    assert [(f.kind, f.lane, f.address) for f in findings()] == [("outside_memory", -1, memory.address + 4)]


@ON_CHIPS
@pytest.mark.parametrize("register", [4, 5, 6])
def test_a_scalar_load_from_an_undefined_address_is_reported(chip: Chip, register: int) -> None:
    findings()
    memory = DeviceMemory(np.zeros(4, np.uint32))
    code, wave = Code(chip), new_wave(chip)
    wave.s[4:7] = memory.address & 0xFFFFFFFF, memory.address >> 32, 0
    wave.s_defined[register] = 0
    code.scalar_load("b32", 16, 4, register=6)
    wave.run(chip, code.end())
    assert not wave.s_defined[16]
    assert [(f.kind, f.lane) for f in findings()] == [("undefined_address", -1)]


@ON_CHIPS
@pytest.mark.parametrize("stride", [0, 4])
def test_a_scalar_load_past_the_end_of_a_buffer_gives_0(chip: Chip, stride: int) -> None:
    findings()
    memory = DeviceMemory(np.arange(1, 17, dtype=np.uint32))
    code, wave = Code(chip), new_wave(chip)
    wave.s[4:8] = memory.address & 0xFFFFFFFF, memory.address >> 32 | stride << 16, 24 // max(1, stride), 0
    code.scalar_load("b128", 16, 4, offset=12, from_buffer=True)
    code.scalar_load("b128", 20, 4, offset=24, from_buffer=True)
    code.scalar_load("b64", 24, 4, offset=16, from_buffer=True)
    wave.run(chip, code.end())
    np.testing.assert_array_equal(wave.s[16:26], [4, 5, 6, 0, 0, 0, 0, 0, 5, 6])
    assert wave.s_defined[16:26].all()
    assert not findings()
