"""Atomic operations: each lane's update against exact arithmetic, in every address space."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import numpy as np
import pytest
from tinygrad.renderer.amd.dsl import s, v

from emulated_gpu.chips import Chip
from emulated_gpu_tests.wave.memory_code import (
    ALL_CHIPS,
    CDNA,
    RDNA3,
    Code,
    DeviceMemory,
    dwords_of,
    registers,
    resource,
)
from emulated_gpu_tests.wave.single_grid import run_grid
from emulated_gpu_tests.wave.test_global_memory import (
    ODD_LANES,
    ON_CHIPS,
    active,
    findings,
    new_wave,
    set_addresses,
)

SHARED, PRIVATE = 1 << 48, 2 << 48
Update = Callable[[int, int, int], int]  # of what is in memory, the data, and what is compared


def signed(value: int, bits: int) -> int:
    return value - (value >> bits - 1 << bits)


def integers(bits: int) -> dict[str, Update]:
    mask = 2**bits - 1
    return {
        f"add_u{bits}": lambda memory, data, _: memory + data & mask,
        f"sub_u{bits}": lambda memory, data, _: memory - data & mask,
        f"inc_u{bits}": lambda memory, data, _: 0 if memory >= data else memory + 1,
        f"dec_u{bits}": lambda memory, data, _: data if memory == 0 or memory > data else memory - 1,
        f"min_u{bits}": lambda memory, data, _: min(memory, data),
        f"max_u{bits}": lambda memory, data, _: max(memory, data),
        f"min_i{bits}": lambda memory, data, _: min(memory, data, key=lambda x: signed(x, bits)),
        f"max_i{bits}": lambda memory, data, _: max(memory, data, key=lambda x: signed(x, bits)),
        f"and_b{bits}": lambda memory, data, _: memory & data,
        f"or_b{bits}": lambda memory, data, _: memory | data,
        f"xor_b{bits}": lambda memory, data, _: memory ^ data,
        f"swap_b{bits}": lambda memory, data, _: data,
        f"cmpswap_b{bits}": lambda memory, data, compared: data if memory == compared else memory,
    }


def as_float(bits: int, kind: str) -> float:
    if kind == "bf16":
        return as_float(bits << 16, "f32")
    codes = {"f16": "<He", "f32": "<If", "f64": "<Qd"}[kind]
    return float(struct.unpack(f"<{codes[2]}", struct.pack(f"<{codes[1]}", bits))[0])


def float_sum(kind: str) -> Update:
    """With numpy's types, which round to nearest even; bf16 by exact addition in f64 and integer rounding."""
    numpy_type = {"f16": np.float16, "f32": np.float32, "f64": np.float64}.get(kind)

    def add(memory: int, data: int, _: int) -> int:
        with np.errstate(all="ignore"):
            if numpy_type is None:
                return bf16_bits(as_float(memory, kind) + as_float(data, kind))
            dtype = np.dtype(numpy_type)
            unsigned = np.dtype(f"u{dtype.itemsize}")
            a, b = (np.array(x, unsigned).view(dtype) for x in (memory, data))
            return int((a + b).view(unsigned))

    return add


def bf16_bits(value: float) -> int:
    """To nearest even, by comparing with both neighbours."""
    if math.isnan(value):
        return 0x7FC0
    below = _truncated(value)
    if math.isinf(value) or as_float(below, "bf16") == value:
        return below
    low, high = (abs(bf16_as_exact(bits) - value) for bits in (below, below + 1))
    return below + (high < low or (high == low and below & 1 == 1))


def _truncated(value: float) -> int:
    """The bf16 that is nearest towards zero."""
    sign = 0x8000 if math.copysign(1, value) < 0 else 0
    magnitude = abs(value)
    if math.isinf(magnitude):
        return sign | 0x7F80
    low, high = 0, 0x7F7F
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if as_float(middle, "bf16") <= magnitude else (low, middle - 1)
    return sign | low


def bf16_as_exact(bits: int) -> float:
    """Infinity stands where the next number would be."""
    value = as_float(bits, "bf16")
    return math.copysign(2.0**128, value) if math.isinf(value) else value


def chosen(kind: str, sign: int) -> Update:
    """MinNum and maxNum of IEEE 754-2008, with -0 below +0; of two NaN the operand's, quieted."""
    quiet = {"f32": 1 << 22, "f64": 1 << 51}[kind]

    def choose(memory: int, data: int, _: int) -> int:
        a, b = as_float(data, kind), as_float(memory, kind)
        if math.isnan(a) and math.isnan(b):
            return data | quiet
        if math.isnan(a) or math.isnan(b):
            return memory if math.isnan(a) else data
        return (min if sign > 0 else max)(
            (a, data), (b, memory), key=lambda x: (x[0], math.copysign(1, x[0]))
        )[1]

    return choose


def compared_floats(kind: str) -> Update:
    return lambda memory, data, compared: (
        data if as_float(memory, kind) == as_float(compared, kind) else memory
    )


def both_halves(update: Update) -> Update:
    return lambda memory, data, _: (
        update(memory & 0xFFFF, data & 0xFFFF, 0) | update(memory >> 16, data >> 16, 0) << 16
    )


def less_or_zero(memory: int, data: int, _: int) -> int:
    return memory - data if memory >= data else 0


UPDATES: dict[str, Update] = {
    **integers(32),
    **integers(64),
    "csub_u32": less_or_zero,
    "sub_clamp_u32": less_or_zero,
    "cond_sub_u32": lambda memory, data, _: memory - data if memory >= data else memory,
    "rsub_u32": lambda memory, data, _: data - memory & 0xFFFFFFFF,
    "rsub_u64": lambda memory, data, _: data - memory & 2**64 - 1,
    "mskor_b32": lambda memory, data, second: memory & ~data | second,
    "mskor_b64": lambda memory, data, second: memory & ~data | second,
    "add_f32": float_sum("f32"),
    "add_f64": float_sum("f64"),
    "min_f32": chosen("f32", 1),
    "max_f32": chosen("f32", -1),
    "min_f64": chosen("f64", 1),
    "max_f64": chosen("f64", -1),
    "cmpswap_f32": compared_floats("f32"),
    "cmpswap_f64": compared_floats("f64"),
    "pk_add_f16": both_halves(float_sum("f16")),
    "pk_add_bf16": both_halves(float_sum("bf16")),
}

COMMON = [*integers(32), *integers(64), "add_f32"]
MEMORY_ONLY = {
    9: ["add_f64", "min_f64", "max_f64", "pk_add_f16", "pk_add_bf16"],
    11: ["csub_u32", "cmpswap_f32", "min_f32", "max_f32"],
    12: ["sub_clamp_u32", "cond_sub_u32", "min_f32", "max_f32", "pk_add_f16", "pk_add_bf16"],
}
LDS_ONLY = {
    9: ["add_f64", "min_f32", "max_f32", "min_f64", "max_f64", "pk_add_f16", "pk_add_bf16"],
    11: ["min_f32", "max_f32", "min_f64", "max_f64"],
    12: [
        "min_f32",
        "max_f32",
        "min_f64",
        "max_f64",
        "sub_clamp_u32",
        "cond_sub_u32",
        "pk_add_f16",
        "pk_add_bf16",
    ],
}
LDS_COMMON = ["rsub_u32", "rsub_u64", "mskor_b32", "mskor_b64"]

EDGES = {
    "u32": [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF, 5],
    "u64": [0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1, 0xFFFFFFFF],
    "f32": [0, 1 << 31, 0x3F800000, 0xBF800001, 0x7F800000, 0xFF800000, 1, 0x7F7FFFFF],
    "f64": [0, 1 << 63, 0x3FF << 52, 0xBFF << 52 | 1, 0x7FF << 52, 0xFFF << 52, 1, (0x7FF << 52) - 1],
    "f16": [0, 0x8000, 0x3C00, 0xBC01, 0x7C00, 0x0001, 0x7BFF, 0x1401],
    "bf16": [0, 0x8000, 0x3F80, 0xBF81, 0x7F80, 0x0001, 0x7F7F, 0x3B81],
}
NANS = {"f32": [0x7FC00001, 0xFF800001], "f64": [0x7FF8 << 48 | 3, 0xFFF << 52 | 1]}


def values(kind: str, seed: int) -> list[int]:
    """64 values that pair edges with edges over two seeds, and random ones."""
    element = kind.rpartition("_")[2].replace("b32", "u32").replace("b64", "u64").replace("i", "u")
    edges = list(EDGES[element])
    if kind.startswith(("min_f", "max_f")):
        edges[6:] = NANS[element]
    edge = [edges[(n // 8 if seed else n) % 8] for n in range(64)]
    if kind.startswith("pk_"):
        return [edge[n] | edge[63 - n] << 16 for n in range(64)]
    if kind.startswith(("inc", "dec", "cmpswap")) or seed == 2:
        return edge
    random = np.random.default_rng(seed).integers(0, 2**63, 64, dtype=np.uint64)
    bits = 64 if kind.endswith("64") else 32
    return [int(random[n]) & 2**bits - 1 if n % 9 == 8 and "f" not in element else edge[n] for n in range(64)]


def halves_of(numbers: list[int], dwords: int) -> np.ndarray:
    return np.array([[number >> 32 * d & 0xFFFFFFFF for number in numbers] for d in range(dwords)], np.uint32)


def compared_with(kind: str, memory: list[int]) -> list[int]:
    """Equal in two lanes of three; a float also where only the sign of zero differs."""
    top = 63 if kind.endswith("64") else 31
    return [
        (m ^ (1 << top) if "_f" in kind and m in (0, 1 << top) else m)
        if n % 3
        else m + 1 & 2 ** (top + 1) - 1
        for n, m in enumerate(memory)
    ]


def same(kind: str, left: int, right: int) -> bool:
    """Equal bits, or NaN where a sum is NaN."""
    if left == right:
        return True
    parts = (
        [(left, right)] if "pk_" not in kind else [(left & 0xFFFF, right & 0xFFFF), (left >> 16, right >> 16)]
    )
    element = kind.rpartition("_")[2]
    return "add_" in kind and all(
        a == b or (math.isnan(as_float(a, element)) and math.isnan(as_float(b, element))) for a, b in parts
    )


def check(
    kind: str, lanes: np.ndarray, before: list[int], after: list[int], data: list[int], second: list[int]
) -> None:
    for lane in range(64):
        expected = UPDATES[kind](before[lane], data[lane], second[lane]) if lane in lanes else before[lane]
        assert same(kind, after[lane], expected), (
            kind,
            lane,
            hex(before[lane]),
            hex(data[lane]),
            hex(after[lane]),
        )


def numbers_of(rows: np.ndarray) -> list[int]:
    return [sum(int(row[lane]) << 32 * d for d, row in enumerate(rows)) for lane in range(rows.shape[1])]


SPACES = ("returning", "plain", "flat", "buffer")
MEMORY_CASES = [(chip, kind) for chip in ALL_CHIPS for kind in COMMON + MEMORY_ONLY[chip.generation]]


@pytest.mark.parametrize(("chip", "kind"), MEMORY_CASES, ids=lambda each: getattr(each, "name", each))
def test_updates_of_memory(chip: Chip, kind: str) -> None:
    findings()
    dwords = dwords_of(kind)
    before, data = values(kind, 0), values(kind, 1)
    second = compared_with(kind, before)
    memory = {space: DeviceMemory(halves_of(before, dwords).T.copy()) for space in SPACES}
    code, wave = Code(chip), new_wave(chip, ODD_LANES | 0xFFFFFF)
    places = np.arange(64, dtype=np.uint64) * 4 * dwords
    wave.v[20:24] = np.concatenate([halves_of(data, dwords), halves_of(second, dwords), np.zeros((4, 64))])[
        :4
    ]
    wave.v[14:18] = wave.v[20:24]  # a buffer's atomic returns where its data was
    for number, space in enumerate(SPACES[:3]):
        set_addresses(wave, 2 * number, memory[space].address + places)
    wave.v[6] = places
    wave.s[4:8] = resource(chip, memory["buffer"].address, 4 * dwords * 60)
    code.atomic("global", kind, 20, 0, dst=10)
    code.atomic("global", kind, 20, 2)
    code.atomic("flat" if kind != "csub_u32" else "global", kind, 20, 4, dst=12)
    code.buffer("atomic", kind, 14, 6, 4, offen=1, returns=1)
    wave.run(chip, code.end())
    lanes = active(wave, chip)
    for space, contents in memory.items():
        reached = lanes[lanes < 60] if space == "buffer" else lanes
        check(kind, reached, before, numbers_of(contents.array.T), data, second)
    for register, end in ((10, 64), (12, 64), (14, 60)):
        returned = numbers_of(wave.v[register : register + dwords])
        assert [returned[lane] for lane in lanes] == [before[lane] if lane < end else 0 for lane in lanes]
    assert not findings()


LDS_CASES = [(chip, kind) for chip in ALL_CHIPS for kind in COMMON + LDS_COMMON + LDS_ONLY[chip.generation]]


def lds_atomic(code: Code, kind: str, address: int, data: int, second: int, dst: int | None) -> None:
    """ds_* by the chip's name. A compare-and-swap has the new value in `data`, the other in `second`."""
    generation = code.chip.generation
    name, _, element = kind.rpartition("_")
    name = {"swap": "wrxchg" if generation == 9 else "storexchg"}.get(name, name)
    name = {"cmpswap": "cmpst" if generation == 9 else "cmpstore"}.get(name, name)
    if generation == 12 and kind.startswith(("min_f", "max_f")):
        name += "_num"
    dwords = dwords_of(kind)
    fields = {"addr": v[address], "data0": registers(data, dwords)}
    if "cmp" in name or "mskor" in name:
        pair = (second, data) if name == "cmpst" else (data, second)
        fields |= {"data0": registers(pair[0], dwords), "data1": registers(pair[1], dwords)}
    if dst is not None:  # of a compare-and-swap of 64 bits tinygrad's tables name one register
        fields["vdst"] = registers(dst, 1 if name == "cmpstore" else dwords)
    code.emit(f"ds_{name}{'_rtn' if dst is not None else ''}_{element}", **fields)


@pytest.mark.parametrize(("chip", "kind"), LDS_CASES, ids=lambda each: getattr(each, "name", each))
def test_updates_of_lds(chip: Chip, kind: str) -> None:
    findings()
    dwords = dwords_of(kind)
    before, data = values(kind, 0), values(kind, 1)
    second = compared_with(kind, before) if "cmp" in kind else values(kind, 2)
    content = halves_of(before, dwords).T
    code = Code(chip)
    wave = new_wave(
        chip, ODD_LANES | 0xFFFF, lds=np.concatenate([content, content]).reshape(-1).view(np.uint8)
    )
    wave.v[0] = np.arange(64) * 4 * dwords
    wave.v[1] = wave.v[0] + content.nbytes
    wave.v[20 : 20 + dwords], wave.v[22 : 22 + dwords] = halves_of(data, dwords), halves_of(second, dwords)
    lds_atomic(code, kind, 0, 20, 22, dst=10)
    if "swap" not in kind or "cmp" in kind:  # an exchange always returns
        lds_atomic(code, kind, 1, 20, 22, dst=None)
    wave.run(chip, code.end())
    lanes = active(wave, chip)
    after = wave.lds.view(np.uint32).reshape(2, 64, dwords)
    check(kind, lanes, before, numbers_of(after[0].T), data, second)
    if "swap" not in kind or "cmp" in kind:
        check(kind, lanes, before, numbers_of(after[1].T), data, second)
    returned = numbers_of(wave.v[10 : 10 + dwords])
    assert [returned[lane] for lane in lanes] == [before[lane] for lane in lanes]
    assert not findings()


@ON_CHIPS
def test_lanes_update_one_address_in_turn(chip: Chip) -> None:
    findings()
    memory = DeviceMemory(np.array([1000, 0], np.uint32))
    code, wave = Code(chip), new_wave(chip, lds=np.zeros(256, np.uint8))
    set_addresses(wave, 0, np.full(64, memory.address, np.uint64))
    set_addresses(wave, 2, np.full(64, SHARED + 8, np.uint64))
    wave.v[20] = 3
    code.atomic("global", "add_u32", 20, 0, dst=10)
    code.atomic("flat", "add_u32", 20, 2, dst=11)
    wave.run(chip, code.end())
    assert sorted(wave.v[10, : chip.lanes]) == [1000 + 3 * n for n in range(chip.lanes)]
    assert sorted(wave.v[11, : chip.lanes]) == [3 * n for n in range(chip.lanes)]
    assert memory.array[0] == 1000 + 3 * chip.lanes
    assert wave.lds.view(np.uint32)[2] == 3 * chip.lanes
    assert not findings()


def test_workgroups_lose_no_update() -> None:
    memory = DeviceMemory(np.zeros(2, np.uint32))
    code = Code(CDNA)
    code.set_scalar64(4, memory.address)
    code.emit("v_mov_b32_e32", v[2], s[4])
    code.emit("v_mov_b32_e32", v[3], s[5])
    code.emit("v_mov_b32_e32", v[4], 1)
    for _ in range(50):
        code.atomic("global", "add_u32", 4, 2)
    result = run_grid(CDNA, code.end(), workgroups=(40, 1, 1))
    assert memory.array[0] == 40 * 64 * 50
    assert not result.findings


@ON_CHIPS
def test_what_atomic_operations_report(chip: Chip) -> None:
    findings()
    memory = DeviceMemory(np.zeros(64, np.uint32))
    code, wave = Code(chip), new_wave(chip, lds=np.zeros(128, np.uint8))
    places = memory.address + np.arange(64, dtype=np.uint64) % 8 * 4
    places[2], places[5] = memory.address + 256, memory.address + 6
    set_addresses(wave, 0, places)
    wave.v_defined[20] ^= np.uint64(1 << 9)
    wave.v[2], wave.v[20] = np.arange(64) % 8 * 4, 1
    wave.v[2, 3], wave.v[2, 7] = 126, 128
    code.atomic("global", "add_u32", 20, 0, dst=10)
    lds_atomic(code, "add_u32", 2, 20, 22, dst=11)
    wave.run(chip, code.end())
    assert [(f.kind, f.lane, f.address) for f in findings()] == [
        ("undefined_stored", 9, int(places[9])),
        ("misaligned", 5, int(places[5])),
        ("outside_memory", 2, int(places[2])),
        ("misaligned", 3, 126),
        ("outside_lds", 7, 128),
    ]
    assert [lane for lane in range(chip.lanes) if not int(wave.v_defined[10]) >> lane & 1] == [2, 5]
    assert {3, 7} <= {lane for lane in range(chip.lanes) if not int(wave.v_defined[11]) >> lane & 1}
    assert wave.v[10, 2] == wave.v[10, 5] == wave.v[11, 3] == wave.v[11, 7] == 0xFFFFFFFF


def test_an_update_of_scratch_stops_the_kernel() -> None:
    findings()
    code, wave = Code(RDNA3), new_wave(RDNA3)
    set_addresses(wave, 0, np.full(64, PRIVATE, np.uint64))
    code.atomic("flat", "add_u32", 20, 0)
    wave.run(RDNA3, code.end(), scratch_bytes=64)
    assert wave.status != 0
    assert [f.kind for f in findings()] == ["unknown_instruction"]
