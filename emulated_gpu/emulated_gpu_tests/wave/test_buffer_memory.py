"""Accesses through buffer resources: against the rules for addresses and range checks of one lane."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from tinygrad.renderer.amd.dsl import s

from emulated_gpu.chips import Chip
from emulated_gpu_tests.wave.memory_code import (
    ALL_CHIPS,
    CDNA,
    RDNA3,
    RDNA4,
    Code,
    DeviceMemory,
    dwords_of,
    resource,
)
from emulated_gpu_tests.wave.single_wave import M0
from emulated_gpu_tests.wave.test_global_memory import (
    ODD_LANES,
    ON_CHIPS,
    active,
    findings,
    new_wave,
    random_bytes,
)

KINDS = {"u8": 1, "u16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16}
STRUCTURED, INDEXED, EMPTY, RAW = range(4)  # RDNA's OOB_SELECT


@dataclass(frozen=True)
class Buffer:
    """A resource, and how an instruction uses it. `element`: bytes that swizzling keeps together, or 0."""

    chip: Chip
    records: int
    stride: int = 0
    element: int = 0
    index_stride: int = 8
    checks: int = RAW
    has_index: bool = False
    has_offset: bool = True
    scalar: int = 0
    constant: int = 0
    adds_lane: bool = False

    def words(self, address: int) -> list[int]:
        swizzle = {0: 0, 4: 1, 8: 2, 16: 3}[self.element]
        return resource(
            self.chip,
            address,
            self.records,
            stride=self.stride,
            swizzle=swizzle,
            index_stride={8: 0, 16: 1, 32: 2, 64: 3}[self.index_stride],
            checks=self.checks,
            adds_lane=self.adds_lane,
        )

    def flags(self) -> dict[str, int]:
        return {"offen": int(self.has_offset), "idxen": int(self.has_index)}

    @property
    def checks_offsets(self) -> bool:
        """Whether an offset that is too large is noticed; where it is not, it must lie in memory."""
        if self.chip.generation == 9:
            return bool(self.element) or not (self.stride and self.has_index)
        return self.checks in (RAW, STRUCTURED)

    def offset_of(self, offset: int) -> int:
        """The two offsets, added in 32 bits: IREE counts loops up from negative ones."""
        return ((offset if self.has_offset else 0) + self.constant) % 2**32

    def place(self, lane: int, index: int, offset: int) -> int:
        """Where in memory a lane accesses (CDNA 3 and RDNA 3 ISA manuals, "Buffer Addressing")."""
        index = (index if self.has_index else 0) + (lane if self.adds_lane else 0)
        offset = self.offset_of(offset)
        if not self.element or (self.chip.generation == 9 and not self.has_index):
            return self.scalar + index * self.stride + offset
        index_msb, index_lsb = divmod(index, self.index_stride)
        offset_msb, offset_lsb = divmod(offset, self.element)
        block = (index_msb * self.stride + offset_msb * self.element) * self.index_stride
        return self.scalar + block + index_lsb * self.element + offset_lsb

    def is_inside(self, lane: int, index: int, offset: int, size: int) -> bool:
        """Whether `size` bytes at the offset of a lane are (the same manuals, "Range Checking")."""
        index = (index if self.has_index else 0) + (lane if self.adds_lane else 0)
        offset = self.offset_of(offset)
        if self.chip.generation == 9:
            if self.stride == 0 or not self.has_index:
                return index * self.stride + offset + size <= self.records - self.scalar
            return index < self.records and (not self.element or offset + size <= self.stride)
        checks = self.checks
        if checks == RAW and self.element and self.stride:
            checks = STRUCTURED
        return {
            RAW: index * self.stride + offset + size <= self.records,
            STRUCTURED: index < self.records and offset + size <= self.stride,
            INDEXED: index < self.records,
            EMPTY: self.records > 0,
        }[checks]


def on_chips(**fields: object) -> list[Buffer]:
    return [Buffer(chip, **fields) for chip in ALL_CHIPS]  # type: ignore[arg-type]


BUFFERS = {
    "raw": on_chips(records=300),
    "raw, constant": on_chips(records=300, constant=40),
    "raw, no offset": on_chips(records=300, has_offset=False, constant=17),
    "raw, scalar": on_chips(records=300, scalar=64),
    "raw, scalar past the end": on_chips(records=32, scalar=64),
    "raw with a stride": on_chips(records=300, stride=16),
    "raw with an index": on_chips(records=300, has_index=True),
    "structured": on_chips(records=20, stride=24, checks=STRUCTURED, has_index=True),
    "structured, no offset": on_chips(
        records=20, stride=24, checks=STRUCTURED, has_index=True, has_offset=False
    ),
    "structured, of a lane": on_chips(records=20, stride=24, checks=INDEXED, has_index=True, adds_lane=True),
    "indexed": on_chips(records=20, stride=24, checks=INDEXED, has_index=True, constant=8),
    "empty": on_chips(records=0, checks=EMPTY),
    "not empty": on_chips(records=1, checks=EMPTY),
    "swizzled": on_chips(records=20, stride=16, element=4, checks=STRUCTURED, has_index=True),
    "swizzled by 16": on_chips(records=40, stride=32, element=4, index_stride=16, has_index=True),
    "swizzled without an index": on_chips(records=20, stride=16, element=4, index_stride=32),
    "swizzled by lane": on_chips(
        records=64, stride=16, element=4, index_stride=64, has_index=True, adds_lane=True
    ),
    "elements of 8": [Buffer(RDNA3, 20, 32, 8, has_index=True), Buffer(RDNA4, 20, 32, 8, has_index=True)],
    "elements of 16": [Buffer(RDNA3, 20, 32, 16, has_index=True), Buffer(RDNA4, 20, 32, 16, has_index=True)],
}
CASES = [pytest.param(b, id=f"{name}-{b.chip.name}") for name, buffers in BUFFERS.items() for b in buffers]


def lanes_of(buffer: Buffer) -> tuple[np.ndarray, np.ndarray]:
    """An index and an offset a lane, inside and outside; some sums with the constant wrap around."""
    random = np.random.default_rng(7)
    indices = random.integers(0, 24, 64).astype(np.uint64)
    offsets = random.integers(0, max(8, buffer.stride), 64).astype(np.uint64)
    if not buffer.has_index:
        offsets = random.integers(0, 320, 64).astype(np.uint64)
    offsets[3] = 0
    if buffer.checks_offsets:
        offsets[[10, 11]] = 2**32 - 4, 2**32 - 1 - buffer.constant
    elif buffer.checks != EMPTY:
        indices[10] = 2**31
    return indices, offsets


def set_lanes(wave_v: np.ndarray, buffer: Buffer, indices: np.ndarray, offsets: np.ndarray) -> None:
    rows = [values for values, used in ((indices, buffer.has_index), (offsets, buffer.has_offset)) if used]
    for register, values in enumerate(rows):
        wave_v[register] = values


@pytest.mark.parametrize("buffer", CASES)
def test_a_load_gives_0_outside_the_buffer(buffer: Buffer) -> None:
    findings()
    memory = DeviceMemory(random_bytes(16384))
    chip = buffer.chip
    indices, offsets = lanes_of(buffer)
    code, wave = Code(chip), new_wave(chip, ODD_LANES | 0xFF)
    wave.s[4:8] = buffer.words(memory.address)
    wave.s[9] = buffer.scalar
    set_lanes(wave.v, buffer, indices, offsets)
    for number, kind in enumerate(KINDS):
        code.buffer("load", kind, 10 + 4 * number, 0, 4, s[9], buffer.constant, **buffer.flags())
    before = wave.v.copy()
    wave.run(chip, code.end())
    for number, (kind, size) in enumerate(KINDS.items()):
        for lane in active(wave, chip):
            expected = [
                _loaded(buffer, memory, lane, int(indices[lane]), int(offsets[lane]), kind, dword)
                for dword in range((size + 3) // 4)
            ]
            rows = slice(10 + 4 * number, 10 + 4 * number + dwords_of(kind))
            assert wave.v[rows, lane].tolist() == expected, (kind, lane)
            before[rows, lane] = expected
    np.testing.assert_array_equal(wave.v, before)
    assert not findings()


def _loaded(
    buffer: Buffer, memory: DeviceMemory, lane: int, index: int, offset: int, kind: str, dword: int
) -> int:
    """Each dword is checked for itself, and follows the one before, under swizzling too."""
    size = min(4, KINDS[kind])
    if not buffer.is_inside(lane, index, offset + 4 * dword, size):
        return 0
    at = buffer.place(lane, index, offset) + 4 * dword
    return int.from_bytes(memory.array[at : at + size].tobytes(), "little")


@pytest.mark.parametrize("buffer", CASES)
@pytest.mark.parametrize("kind", ["b8", "b16", "b32", "b96"])
def test_a_store_outside_the_buffer_is_dropped(buffer: Buffer, kind: str) -> None:
    findings()
    memory = DeviceMemory(random_bytes(16384))
    expected = memory.array.copy()
    chip = buffer.chip
    size = {"b8": 1, "b16": 2, "b32": 4, "b96": 12}[kind]
    indices, offsets = lanes_of(buffer)
    code, wave = Code(chip), new_wave(chip)
    offsets -= offsets % 4
    set_lanes(wave.v, buffer, indices, offsets)
    wave.v[40:43] = 0x01010101  # the same in every lane, as lanes overlap
    wave.s[4:8] = buffer.words(memory.address)
    wave.s[9] = buffer.scalar
    code.buffer("store", kind, 40, 0, 4, s[9], buffer.constant, **buffer.flags())
    wave.run(chip, code.end())
    for lane in active(wave, chip):
        index, offset = int(indices[lane]), int(offsets[lane])
        for start in range(0, size, 4):
            width = min(4, size)
            if buffer.is_inside(lane, index, offset + start, width):
                at = buffer.place(lane, index, offset) + start
                expected[at : at + width] = 1
    np.testing.assert_array_equal(memory.array, expected)
    assert not findings()


@ON_CHIPS
def test_a_store_writes_each_lanes_data(chip: Chip) -> None:
    memory = DeviceMemory(np.zeros(256, np.uint32))
    code, wave = Code(chip), new_wave(chip, ODD_LANES)
    wave.v[0] = np.arange(64) * 16
    wave.s[4:8] = resource(chip, memory.address, 40 * 16 + 8)
    code.buffer("store", "b128", 40, 0, 4, offen=1)
    wave.run(chip, code.end())
    expected = np.zeros((64, 4), np.uint32)
    for lane in active(wave, chip):
        expected[lane] = wave.v[40:44, lane]
    expected[41:] = 0
    expected[40] = 0  # lane 40 is even; the half of it that is inside belongs to no lane that runs
    np.testing.assert_array_equal(memory.array.reshape(64, 4), expected)


@ON_CHIPS
def test_the_part_of_a_store_that_is_inside_is_written(chip: Chip) -> None:
    memory = DeviceMemory(np.zeros(64, np.uint32))
    code, wave = Code(chip), new_wave(chip, 1 << 7)
    wave.v[0] = 20
    wave.s[4:8] = resource(chip, memory.address, 29)  # ends within the third dword
    code.buffer("store", "b128", 40, 0, 4, offen=1)
    wave.run(chip, code.end())
    np.testing.assert_array_equal(memory.array[4:9], [0, *wave.v[40:42, 7], 0, 0])


@ON_CHIPS
def test_a_buffer_that_reaches_past_its_memory_is_reported(chip: Chip) -> None:
    findings()
    memory = DeviceMemory(np.arange(64, dtype=np.uint32))
    code, wave = Code(chip), new_wave(chip)
    wave.v[0] = np.arange(64) * 4
    wave.v[0, 3] = 256
    wave.s[4:8] = resource(chip, memory.address, 2**31)
    code.buffer("load", "b32", 10, 0, 4, offen=1)
    wave.run(chip, code.end())
    assert wave.v[10, 3] == 0xFFFFFFFF
    assert wave.v_defined[10] == np.uint64(2**64 - 1 - 8)
    assert [(f.kind, f.lane, f.address) for f in findings()] == [("outside_memory", 3, memory.address + 256)]


@ON_CHIPS
def test_undefined_offsets_indices_and_resources_are_reported(chip: Chip) -> None:
    findings()
    memory = DeviceMemory(np.arange(64, dtype=np.uint32))
    code, wave = Code(chip), new_wave(chip)
    wave.v[0:2] = 0
    wave.v_defined[0] ^= np.uint64(1 << 2)
    wave.v_defined[1] ^= np.uint64(1 << 5)
    wave.s[4:8] = wave.s[8:12] = resource(chip, memory.address, 64, stride=4, checks=STRUCTURED)
    wave.s_defined[10] = 0
    code.buffer("load", "b32", 10, 0, 4, offen=1, idxen=1)
    code.buffer("load", "b32", 11, 3, 8)
    code.buffer("load", "b32", 12, 3, 4)
    wave.run(chip, code.end())
    whole = np.uint64(2**chip.lanes - 1)
    assert wave.v_defined[10] & whole == whole ^ np.uint64(1 << 2 | 1 << 5)
    assert wave.v[10, 2] == wave.v[10, 5] == wave.v[11, 0] == 0xFFFFFFFF
    assert wave.v_defined[11] & whole == 0
    assert wave.v_defined[12] & whole == whole
    assert [(f.kind, f.lane) for f in findings()] == [("undefined_address", 2), ("undefined_address", 0)]


def test_a_buffer_load_to_lds() -> None:
    findings()
    memory = DeviceMemory(np.arange(1, 65, dtype=np.uint32))
    code, wave = Code(CDNA), new_wave(CDNA, lds=np.full(512, 0xFF, np.uint8))
    wave.v[0] = np.arange(64) * 4
    wave.s[4:8] = resource(CDNA, memory.address, 30 * 4)
    wave.s[M0] = 128
    code.buffer("load", "b32", 10, 0, 4, offen=1, lds=1)
    before = wave.v.copy()
    wave.run(CDNA, code.end())
    expected = np.where(np.arange(64) < 30, np.arange(1, 65), 0)
    np.testing.assert_array_equal(wave.lds.view(np.uint32)[32:96], expected)
    np.testing.assert_array_equal(wave.v, before)
    assert not findings()


@ON_CHIPS
def test_a_load_of_16_bits_to_the_upper_half(chip: Chip) -> None:
    memory = DeviceMemory(random_bytes(256))
    code, wave = Code(chip), new_wave(chip)
    wave.v[0] = np.arange(64) * 2
    wave.s[4:8] = resource(chip, memory.address, 60)
    old = wave.v[10].copy()
    code.buffer("load", "d16_hi_b16", 10, 0, 4, offen=1)
    wave.run(chip, code.end())
    halves = np.where(np.arange(64) < 30, memory.array.view(np.uint16)[:64], 0).astype(np.uint32)
    np.testing.assert_array_equal(wave.v[10, : chip.lanes], (old & 0xFFFF | halves << 16)[: chip.lanes])
