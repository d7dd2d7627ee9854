"""Matrices quantised in blocks: adjacent weights of a row share a scale and, in some types, a minimum.

`w = scale * q` or `w = scale * q + minimum`, where q is an integer, or twice the value of a 4-bit float.
A scale or a minimum is either an f16, as in GGUF's Q8_0, or an f16 shared by several blocks times a small
integer per block, as in Q4_K. In the second case both factors are stored, as their product in f16 would be
rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

BLOCK = 32
PAIR = 16  # in the GPU layout, a byte holds the 4-bit elements k and k + PAIR
MIDDLE = 8  # of integers of 4 bits, from which kernels for NVIDIA GPUs count

Number = TypeVar("Number", bound=np.generic)
Bits = Literal[8, 4]
Rows = npt.NDArray[np.intp]

# Twice the values of 4-bit floats (e2m1 of MXFP4), indexed by their bits. Doubled values are integers.
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


_E2M1_BITS = np.zeros(256, np.uint8)  # indexed by the byte of a doubled value
_E2M1_BITS[E2M1[::-1].view(np.uint8)] = np.arange(16, dtype=np.uint8)[::-1]


@dataclass(frozen=True, slots=True)
class BlockType:
    """The format of a block: `size` weights of `bits` bits, a scale and, with `has_minima`, a minimum.

    Scales and minima are "terms" in the code. Without a `group`, a term is an f16 per block. With one, a term
    is an i8 per block times an f16 that `group` adjacent weights share; `group` is a multiple of `size`.
    `is_e2m1`: the 4 bits encode a float.
    """

    bits: Bits
    size: int = BLOCK
    has_minima: bool = False
    group: int | None = None
    is_e2m1: bool = False

    def __str__(self) -> str:
        quant = "e2m1" if self.is_e2m1 else f"q{self.bits}"
        return f"{quant}_b{self.size}{'m' * self.has_minima}{f'_g{self.group}' if self.group else ''}"

    @property
    def num_terms(self) -> int:
        return 2 if self.has_minima else 1

    @property
    def spread(self) -> int:
        """The number of adjacent weights that share an f16."""
        return self.group or self.size


Q8_0 = BlockType(8)
Q4_1 = BlockType(4, has_minima=True)  # also holds Q4_0, with minima of -8 scales
MXFP4 = BlockType(4, is_e2m1=True)


@dataclass(frozen=True, slots=True)
class Terms:
    """The scales, or the minima, of a matrix.

    `values` [rows, columns / spread] f16 and, with groups, the integer factors `multiples`
    [rows, columns / size] i8.
    """

    values: npt.NDArray[np.float16]
    multiples: npt.NDArray[np.int8] | None = None

    def wide(self) -> npt.NDArray[np.float32]:
        """Return one scale or minimum per block, [rows, columns / size]; exact in f32."""
        values = self.values.astype(np.float32)
        if self.multiples is None:
            return values
        return _repeated(values, self.multiples.shape[1]) * self.multiples

    def take_rows(self, rows: Rows) -> Terms:
        return Terms(self.values[rows], None if self.multiples is None else self.multiples[rows])

    def converted(self, blocks: int, groups: int | None) -> Terms:
        """Convert to `blocks` blocks and `groups` groups per row.

        If `groups` is None, each scale or minimum is rounded to one f16.
        """
        if groups is None:
            largest = np.finfo(np.float16).max
            return Terms(_repeated(self.wide().clip(-largest, largest).astype(np.float16), blocks))
        ones = np.ones_like(self.values, np.int8)
        multiples = ones if self.multiples is None else self.multiples
        return Terms(_repeated(self.values, groups), _repeated(multiples, blocks))


@dataclass(frozen=True, slots=True)
class Blocks:
    """A quantised matrix [rows, columns], whose rows consist of complete blocks (and groups) of `type`.

    `quants` [rows, columns]: i8 for 8-bit types and for E2M1 (doubled values), u8 in 0..15 for other 4-bit
    types. `minima` is None if the type has no minima.
    """

    type: BlockType
    quants: npt.NDArray[np.int8] | npt.NDArray[np.uint8]
    scales: Terms
    minima: Terms | None = None

    @property
    def terms(self) -> list[Terms]:
        """The scales, and the minima if the type has them."""
        return [self.scales] if self.minima is None else [self.scales, self.minima]

    @property
    def codes(self) -> npt.NDArray[np.int8] | npt.NDArray[np.uint8]:
        """The codes to store: float bits for E2M1, otherwise `quants`."""
        return _E2M1_BITS[self.quants.view(np.uint8)] if self.type.is_e2m1 else self.quants

    def dequantise(self) -> npt.NDArray[np.float32]:
        rows, columns = self.quants.shape
        values = self.quants.reshape(rows, -1, self.type.size) * self.scales.wide()[..., None]
        if self.minima is not None:
            values = values + self.minima.wide()[..., None]
        return values.reshape(rows, columns)

    def take_rows(self, rows: Rows) -> Blocks:
        minima = None if self.minima is None else self.minima.take_rows(rows)
        return replace(self, quants=self.quants[rows], scales=self.scales.take_rows(rows), minima=minima)

    def converted(self, to: BlockType) -> Blocks | None:
        """Convert to the block type `to` without changing the quants; return None if `to` cannot hold them.

        Weights keep their values, except that scales and minima with groups are rounded to f16 if `to` has no
        groups.
        """
        if self.type == to:
            return self
        if not self._fits(to):
            return None
        columns = self.quants.shape[1]
        blocks, groups = columns // to.size, None if to.group is None else columns // to.group
        quants = self.quants.view(np.int8) if to.bits == 8 else self.quants
        terms = [term.converted(blocks, groups) for term in self.terms]
        if to.has_minima and self.minima is None:
            terms.append(_zeros_like(terms[0]))
        return Blocks(to, quants, *terms)

    def _fits(self, to: BlockType) -> bool:
        if to.is_e2m1 or (self.type.is_e2m1 and to.bits == 4):
            return False
        has_room = to.bits >= self.type.bits and to.has_minima >= self.type.has_minima
        divides = self.type.size % to.size == 0
        return has_room and divides and (to.group is None or self.type.spread % to.group == 0)


def common_type(types: Sequence[BlockType]) -> BlockType:
    """Return the smallest type to which blocks of all given types can be converted."""
    first = types[0]
    if all(each == first for each in types):
        return first
    group = None if all(each.group is None for each in types) else gcd(*(each.spread for each in types))
    return BlockType(
        bits=8 if any(each.bits == 8 or each.is_e2m1 for each in types) else 4,
        size=gcd(*(each.size for each in types)),
        has_minima=any(each.has_minima for each in types),
        group=group,
    )


def stack(parts: Sequence[Blocks]) -> Blocks:
    """Stack matrices of the same type and number of columns along the rows."""
    if len(parts) == 1:
        return parts[0]
    terms = [_stack_terms(each) for each in zip(*(part.terms for part in parts), strict=True)]
    return Blocks(parts[0].type, np.concatenate([part.quants for part in parts]), *terms)


def _stack_terms(terms: Sequence[Terms]) -> Terms:
    multiples = [each.multiples for each in terms if each.multiples is not None]
    return Terms(
        np.concatenate([each.values for each in terms]), np.concatenate(multiples) if multiples else None
    )


def _zeros_like(terms: Terms) -> Terms:
    multiples = None if terms.multiples is None else np.zeros_like(terms.multiples)
    return Terms(np.zeros_like(terms.values), multiples)


def _repeated(terms: npt.NDArray[Number], count: int) -> npt.NDArray[Number]:
    """Expand `terms` to `count` columns by repeating each column."""
    return np.repeat(terms, count // terms.shape[1], axis=1)
