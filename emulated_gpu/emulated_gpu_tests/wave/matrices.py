"""Matrices in registers, as AMD's matrix instruction calculator places them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

_GOLDEN_FILE = Path(__file__).with_name("matrix_layouts.json")
GOLDEN: Mapping[str, Any] = json.loads(_GOLDEN_FILE.read_text())

FLOATS = {
    "f64": np.float64,
    "f32": np.float32,
    "xf32": np.float32,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp8": ml_dtypes.float8_e4m3fn,
    "bf8": ml_dtypes.float8_e5m2,
    "fp8_fnuz": ml_dtypes.float8_e4m3fnuz,
    "bf8_fnuz": ml_dtypes.float8_e5m2fnuz,
    "fp6": ml_dtypes.float6_e2m3fn,
    "bf6": ml_dtypes.float6_e3m2fn,
    "fp4": ml_dtypes.float4_e2m1fn,
}
_STORAGE = {4: np.uint8, 6: np.uint8, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


def bits_of(format_: str) -> int:
    """The last number in its name, but for what is named after its exponent and mantissa."""
    names = {"fp8_fnuz": 8, "bf8_fnuz": 8}
    return names.get(format_) or int(format_.lstrip("xbfpiu"))


def values_of(raw: np.ndarray, format_: str) -> np.ndarray:
    """The values of bits (uint64), as float64."""
    bits = bits_of(format_)
    if format_[0] in "iu":
        signed = raw.astype(np.int64) - ((raw >> (bits - 1)).astype(np.int64) << bits)
        return (signed if format_[0] == "i" else raw).astype(np.float64)
    if format_ == "xf32":
        raw = raw & ~np.uint64(0x1FFF)
    floats = np.ascontiguousarray(raw).astype(_STORAGE[bits]).view(FLOATS[format_])
    with np.errstate(invalid="ignore"):  # signalling NaN
        return np.asarray(floats.astype(np.float64))


def bits_from(values: np.ndarray, format_: str) -> np.ndarray:
    """Bits (uint64) of values, rounded to nearest even."""
    if format_[0] in "iu":
        return values.astype(np.int64).astype(np.uint64) & np.uint64((1 << bits_of(format_)) - 1)
    rounded = np.ascontiguousarray(values.astype(FLOATS[format_]))
    return rounded.view(f"u{rounded.itemsize}").astype(np.uint64)


@dataclass(frozen=True)
class Layout:
    """Where a wave holds the elements of a matrix.

    `lane` and `element` have the coordinates [row or column, k or column, block] that each bit of the lane
    and of the element's number in a lane's registers adds.
    """

    bits: int  # of an element
    element: Sequence[Sequence[int] | None]
    lane: Sequence[Sequence[int]]

    @cached_property
    def elements(self) -> list[tuple[int, np.ndarray]]:
        """(number in a lane's registers, [block, row, column] of each lane) of all elements."""
        added = np.zeros((1 << len(self.lane), 3), int)
        for bit, each in enumerate(self.lane):
            added[np.arange(len(added)) >> bit & 1 == 1] += each
        used = [n for n in range(1 << len(self.element)) if all(self.element[bit] for bit in _ones(n))]
        own = [np.array([self.element[bit] for bit in _ones(n)] or [[0] * 3]).sum(0) for n in used]
        return [(n, np.roll(each + added, 1, axis=1)) for n, each in zip(used, own, strict=True)]

    @property
    def num_registers(self) -> int:
        return ((self.elements[-1][0] + 1) * self.bits + 31) // 32

    def place(self, matrix: np.ndarray, registers: np.ndarray) -> None:
        """Puts a matrix of bits, [block, row, column], into rows of `registers`."""
        lanes = 1 << len(self.lane)
        for element, at in self.elements:
            register, shift = divmod(element * self.bits, 32)
            values, mask = matrix[tuple(at.T)], (1 << self.bits) - 1
            for number in range((shift + self.bits + 31) // 32):
                up = 32 * number - shift  # the bits of the element that are in lower registers
                kept = ~np.uint32((mask << shift) >> 32 * number & 0xFFFFFFFF)
                part = values >> np.uint64(up) if up > 0 else values << np.uint64(-up)
                word = registers[register + number]
                word[:lanes] = word[:lanes] & kept | (part & np.uint64(0xFFFFFFFF)).astype(np.uint32)

    def fetch(self, registers: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
        """The bits of a matrix in registers; of replicas the last."""
        matrix = np.zeros(shape, np.uint64)
        wide = np.vstack([registers, np.zeros_like(registers[:1])])[:, : 1 << len(self.lane)].astype(
            np.uint64
        )
        for element, at in self.elements:
            register, shift = divmod(element * self.bits, 32)
            both = wide[register] | wide[register + 1] << np.uint64(32)
            matrix[tuple(at.T)] = both >> np.uint64(shift) & np.uint64((1 << self.bits) - 1)
        return matrix

    def are_defined(self, defined: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
        """Whether all that holds an element is defined; `defined`: bits of lanes for each register."""
        matrix = np.ones(shape, bool)
        for element, at in self.elements:
            first, last = element * self.bits // 32, ((element + 1) * self.bits - 1) // 32
            lanes = np.bitwise_and.reduce(defined[first : last + 1].astype(np.uint64))
            are = lanes >> np.arange(1 << len(self.lane), dtype=np.uint64) & np.uint64(1)
            np.logical_and.at(matrix, tuple(at.T), are.astype(bool))
        return matrix


def _ones(number: int) -> list[int]:
    return [n for n in range(number.bit_length()) if number >> n & 1]


@dataclass(frozen=True)
class Matrices:
    """Shapes, formats and layouts of an instruction's matrices."""

    shape: tuple[int, int, int, int]  # rows, columns, k, blocks
    a_format: str
    b_format: str
    d_format: str
    a: Layout
    b: Layout
    d: Layout

    @property
    def a_shape(self) -> tuple[int, int, int]:
        return self.shape[3], self.shape[0], self.shape[2]

    @property
    def b_shape(self) -> tuple[int, int, int]:
        return self.shape[3], self.shape[1], self.shape[2]  # by columns

    @property
    def d_shape(self) -> tuple[int, int, int]:
        return self.shape[3], self.shape[0], self.shape[1]


def formats_of(name: str) -> tuple[str, str, str]:
    """Of A, B and D: `v_mfma_f32_16x16x32_fp8_bf8` has fp8, bf8 and f32."""
    found = re.fullmatch(r"v_\w+?_([a-z0-9]+)_\d+x\d+x\d+(?:_\d+b)?_?([a-z]\w*?)(?:_1k|_([a-z]\w+))?", name)
    assert found, name
    return found[2], found[3] or found[2], found[1]


@cache
def documented(architecture: str, name: str, lanes: int) -> Matrices:
    """As the golden file has it."""
    about = GOLDEN[f"{architecture} {name} {lanes}"]
    a, b, d = (Layout(about[each]["bits"], about[each]["element"], about[each]["lane"]) for each in "abd")
    return Matrices(tuple(about["shape"]), *formats_of(name), a, b, d)
