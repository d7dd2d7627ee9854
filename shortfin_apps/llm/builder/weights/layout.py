"""Layouts of weights in the parameter file: row-major, or in the panels that the CPU kernels read.

A weight is a matrix [out, in], whose second dimension is also called K. A panel holds 32 of its output
features, so that a kernel reads a panel as one sequential stream. In panels, `pair` neighbours along K are
contiguous: as many as one dot product adds (2 of bf16, 4 of int8, 8 of int8 for SMMLA), or 1.

    BlockRows           name           [out, K] i8; for 4 bits
                                       [out, K / 2] i8: byte j of 16 has the elements j and j + 16 of 32 in
                                       its low and its high 4 bits
                        name.scales    [out, K / size] f16; in groups
                                       [out, 2 * K / group + K / size] i8: the f16 of a row's groups, then
                                       the i8 of its blocks, padded to a multiple of 4
                        name.minima    like the scales, for types with minima
                        With `terms_in_bf16`, scales and minima are bf16; minima of 4 bits are then the
                        values of the quant MIDDLE
    Taps                name           [taps, channels] f32, of a convolution's [channels, taps]
    Fp8Rows             name           [out, K] of the target's 8-bit floats
                        name.scales    [out] f32
    Panels              name           [panels, K / pair, 32 * pair]
    QuantisedPanels     name           [panels, K / pair, 32 * pair] i8; for 4 bits
                                       [panels, K / pair, 16 * pair] i8: byte j has element j of the panel's
                                       first half in its low 4 bits and of its second half in its high 4 bits
                        name.scales    [panels, K / size, 32] f16; with minima
                                       [panels, K / size, 2, 32] f16: scales, then minima; in groups
                                       [panels, K / group, bytes] i8: 32 f16 for the scales and 32 for any
                                       minima, then for each block 32 i8 for either
    TilePanels          name           [panels, K / 32, 2, 16, 32] bf16 or f16: AMX tiles of each half, of 16
                                       pairs
    Int8Panels          name           [panels, K / 64, 2, 64 / pair, 16 * pair] i8: tiles of each half, which
                                       are AMX tiles if `pair` is 4
                        name.scales    [panels, 32] f32

A panel has two halves of 16 features: consecutive features or, if `gated`, 16 of gate and 16 of up (the
matrix has all rows of gate before those of up). The last panel or tile is padded with zeros.

A weight of experts [experts, out, in] is stored as one matrix per expert, concatenated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.builder.quantise import quantise, quantise_fp8, quantise_rows
from shortfin_apps.llm.contract.gpu_code.chips import Fp8Type
from shortfin_apps.llm.model.spec import (
    FloatType,
)
from shortfin_apps.llm.model.weight_blocks import MIDDLE, PAIR, Blocks, BlockType, Terms

LANES = 16  # output features of half a panel
PANEL = 2 * LANES  # output features of a panel
WORD = 4  # bytes
TILE = 64  # bytes along K of an AMX tile
DOT_BYTES = 4  # bytes of a column along K per integer dot product

Array = npt.NDArray[Any]
StoredTypes = dict[str, tuple[tuple[int, ...], str]]  # parameter name -> shape, MLIR dtype

FLOAT_DTYPES: dict[FloatType, np.dtype[Any]] = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
}


FP8_DTYPES: dict[Fp8Type, np.dtype[Any]] = {
    "f8E4M3FN": np.dtype(ml_dtypes.float8_e4m3fn),
    "f8E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
}


class WeightLayout(Protocol):
    """How a weight is stored in the parameter file, as one parameter or several."""

    @property
    def blocks(self) -> BlockType | None:
        """The type of quantised blocks; None for other layouts."""
        ...

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredTypes:
        """Return the shape and MLIR dtype of each parameter of the weight `name`, a matrix of `shape`.

        The order is the order in which kernels read the parameters.
        """
        ...

    def store(self, value: Array | Blocks) -> list[Array]:
        """Return the value of each parameter.

        A layout with `blocks` takes Blocks of exactly this type, or floats, which it quantises. Other
        layouts take only floats.
        """
        ...


@dataclass(frozen=True, slots=True)
class RowMajor:
    """A WeightLayout: row-major floats."""

    dtype: FloatType
    blocks: None = None

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredTypes:
        return {name: (shape, self.dtype)}

    def store(self, value: Array | Blocks) -> list[Array]:
        assert not isinstance(value, Blocks)
        return [cast_floats(value, self.dtype)]


@dataclass(frozen=True, slots=True)
class Taps:
    """A WeightLayout: the factors of a convolution, tap by tap."""

    blocks: None = None

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredTypes:
        channels, taps = shape
        return {name: ((taps, channels), "f32")}

    def store(self, value: Array | Blocks) -> list[Array]:
        assert not isinstance(value, Blocks)
        return [np.ascontiguousarray(cast_floats(value, "f32").T)]


@dataclass(frozen=True, slots=True)
class BlockRows:
    """A WeightLayout: row-major quantised blocks, for GPUs.

    `terms_in_bf16`: store what kernels for NVIDIA GPUs multiply by and add, also instead of groups. It is for
    integers.
    """

    blocks: BlockType
    terms_in_bf16: bool = False

    @property
    def terms_dtype(self) -> str:
        if self.terms_in_bf16:
            return "bf16"
        return "f16" if self.blocks.group is None else "i8"

    def terms_size(self, columns: int) -> int:
        """Return the number of elements that store the scales, or the minima, of a row."""
        blocks = columns // self.blocks.size
        if self.blocks.group is None or self.terms_in_bf16:
            return blocks
        size = 2 * (columns // self.blocks.group) + blocks
        return size + -size % WORD

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredTypes:
        rows, columns = shape
        terms = ((rows, self.terms_size(columns)), self.terms_dtype)
        names = [f"{name}.scales", f"{name}.minima"][: self.blocks.num_terms]
        return {name: ((rows, columns * self.blocks.bits // 8), "i8"), **dict.fromkeys(names, terms)}

    def store(self, value: Array | Blocks) -> list[Array]:
        blocks = _as_blocks(value, self.blocks)
        quants: Array = blocks.codes
        if self.blocks.bits == 4:
            halves = quants.reshape(len(quants), -1, 2, PAIR)
            quants = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(len(quants), -1).view(np.int8)
        if self.terms_in_bf16:
            scales, *minima = (terms.wide() for terms in blocks.terms)
            if self.blocks.bits == 4:
                minima = [minimum + MIDDLE * scales for minimum in minima]
            return [quants, *(cast_floats(terms, "bf16") for terms in (scales, *minima))]
        return [quants, *map(self._store_terms, blocks.terms)]

    def _store_terms(self, terms: Terms) -> Array:
        if terms.multiples is None:
            return terms.values
        both = np.concatenate([np.ascontiguousarray(terms.values).view(np.int8), terms.multiples], axis=1)
        return np.pad(both, [(0, 0), (0, -both.shape[1] % WORD)])


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """A WeightLayout: row-major 8-bit floats and a scale per output feature, for GPUs."""

    dtype: Fp8Type
    blocks: None = None

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredTypes:
        return {name: (shape, self.dtype), f"{name}.scales": ((shape[0],), "f32")}

    def store(self, value: Array | Blocks) -> list[Array]:
        assert not isinstance(value, Blocks)
        return list(quantise_fp8(value, FP8_DTYPES[self.dtype]))


@dataclass(frozen=True, slots=True)
class Panels:
    """A WeightLayout: floats in panels."""

    dtype: FloatType
    pair: int
    gated: bool
    blocks: None = None

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredTypes:
        return {name: ((num_panels(shape[0]), shape[1] // self.pair, PANEL * self.pair), self.dtype)}

    def store(self, value: Array | Blocks) -> list[Array]:
        assert not isinstance(value, Blocks)
        halves = _halves(cast_floats(value, self.dtype), self.gated)
        return [_interleave(halves, self.pair).reshape(len(halves), -1, PANEL * self.pair)]


@dataclass(frozen=True, slots=True)
class TilePanels:
    """A WeightLayout: bf16 or f16 in AMX tiles; the matrix must consist of whole tiles."""

    dtype: FloatType
    gated: bool
    blocks: None = None

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredTypes:
        return {name: ((num_panels(shape[0]), shape[1] // (2 * LANES), 2, LANES, 2 * LANES), self.dtype)}

    def store(self, value: Array | Blocks) -> list[Array]:
        assert not isinstance(value, Blocks)
        return [_tile(_halves(cast_floats(value, self.dtype), self.gated), 2)]


@dataclass(frozen=True, slots=True)
class QuantisedPanels:
    """A WeightLayout: quantised blocks in panels."""

    blocks: BlockType
    pair: int
    gated: bool

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredTypes:
        panels, columns = num_panels(shape[0]), shape[1]
        elements = PANEL * self.pair * self.blocks.bits // 8
        return {
            name: ((panels, columns // self.pair, elements), "i8"),
            f"{name}.scales": panel_terms(self.blocks, panels, columns),
        }

    def store(self, value: Array | Blocks) -> list[Array]:
        blocks = _as_blocks(value, self.blocks)
        values = self._columns([terms.values for terms in blocks.terms])
        multiples = [terms.multiples for terms in blocks.terms if terms.multiples is not None]
        if not multiples:
            scales = values if self.blocks.has_minima else values[:, :, 0]
            return [self._pack(blocks.codes), np.ascontiguousarray(scales)]
        panels, groups = values.shape[:2]
        shared = np.ascontiguousarray(values).view(np.int8).reshape(panels, groups, -1)
        own = self._columns(multiples).reshape(panels, groups, -1)
        return [self._pack(blocks.codes), np.concatenate([shared, own], axis=2)]

    def _columns(self, terms: list[Array]) -> Array:
        """Arrange arrays of scales and minima, [out, count] each, as [panels, count, arrays, 32]."""
        halves = [_halves(each, self.gated).transpose(0, 3, 1, 2) for each in terms]
        return np.stack([each.reshape(*each.shape[:2], PANEL) for each in halves], axis=2)

    def _pack(self, quants: Array) -> Array:
        halves = _interleave(_halves(quants, self.gated), self.pair)
        if self.blocks.bits == 4:
            halves = (halves[:, :, 0] | halves[:, :, 1] << 4)[:, :, None]
        return halves.reshape(*halves.shape[:2], -1).view(np.int8)


@dataclass(frozen=True, slots=True)
class Int8Panels:
    """A WeightLayout: bytes in tiles and a scale per output feature, for int8."""

    gated: bool
    pair: int = DOT_BYTES
    blocks: None = None

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredTypes:
        panels, tiles = num_panels(shape[0]), num_tiles(shape[1])
        return {
            name: ((panels, tiles, 2, TILE // self.pair, LANES * self.pair), "i8"),
            f"{name}.scales": ((panels, PANEL), "f32"),
        }

    def store(self, value: Array | Blocks) -> list[Array]:
        assert not isinstance(value, Blocks)
        quants, scales = quantise_rows(value)
        halves = _halves(quants, self.gated)
        panels, _, _, columns = halves.shape
        tiles = np.zeros((panels, 2, LANES, num_tiles(columns) * TILE), np.int8)
        tiles[..., :columns] = halves
        return [
            _tile(tiles, self.pair, TILE // self.pair),
            _halves(scales[:, None], self.gated).reshape(panels, PANEL),
        ]


def stored_types(layout: WeightLayout, name: str, shape: tuple[int, ...]) -> StoredTypes:
    """Return the shape and MLIR dtype of each parameter of a weight.

    The `shape` of a weight of experts is [experts, out, in].
    """
    if len(shape) < 3:
        return layout.stored(name, shape)
    experts, *matrix = shape
    each = layout.stored(name, tuple(matrix))
    return {name: ((experts * sizes[0], *sizes[1:]), dtype) for name, (sizes, dtype) in each.items()}


def panel_terms(blocks: BlockType, panels: int, columns: int) -> tuple[tuple[int, ...], str]:
    """Return the shape and MLIR dtype of the scales and minima of QuantisedPanels."""
    if blocks.group is None:
        terms = (2,) if blocks.has_minima else ()
        return (panels, columns // blocks.size, *terms, PANEL), "f16"
    return (panels, columns // blocks.group, group_bytes(blocks)), "i8"


def group_bytes(blocks: BlockType) -> int:
    """Return the bytes of the scales and minima of one group of blocks in a panel."""
    assert blocks.group is not None
    return PANEL * blocks.num_terms * (2 + blocks.group // blocks.size)


def _as_blocks(value: Array | Blocks, kind: BlockType) -> Blocks:
    blocks = value if isinstance(value, Blocks) else quantise(value, kind.bits).converted(kind)
    assert blocks is not None
    assert blocks.type == kind
    return blocks


def num_panels(out_features: int) -> int:
    return -(-out_features // PANEL)


def num_tiles(in_features: int) -> int:
    return -(-in_features // TILE)


def cast_floats(value: Array, dtype: FloatType) -> Array:
    """Cast `value` to `dtype`; values out of the range of f16 saturate."""
    if dtype != "f16":
        return value.astype(FLOAT_DTYPES[dtype], copy=False)
    largest = np.finfo(np.float16).max
    return np.clip(value.astype(np.float32, copy=False), -largest, largest).astype(np.float16)


def _halves(matrix: Array, gated: bool) -> Array:
    """Split a matrix into the halves of its panels: [out, columns] -> [panels, 2, lanes, columns]."""
    rows, columns = matrix.shape
    if gated:
        return matrix.reshape(2, rows // 2 // LANES, LANES, columns).swapaxes(0, 1)
    padded = np.zeros((num_panels(rows) * PANEL, columns), matrix.dtype)
    padded[:rows] = matrix
    return padded.reshape(-1, 2, LANES, columns)


def _tile(halves: Array, pair: int, steps: int = LANES) -> Array:
    """Arrange halves as tiles: [panels, 2, lanes, K] -> [panels, tiles, 2, steps along K, lanes * pair]."""
    panels = len(halves)
    ordered = halves.reshape(panels, 2, LANES, -1, steps, pair).transpose(0, 3, 1, 4, 2, 5)
    return np.ascontiguousarray(ordered).reshape(panels, -1, 2, steps, LANES * pair)


def _interleave(halves: Array, pair: int) -> Array:
    """Put `pair` neighbours along K of a lane next to each other.

    [panels, 2, lanes, K] -> [panels, K / pair, 2, lanes * pair].
    """
    panels, _, _, columns = halves.shape
    pairs = halves.reshape(panels, 2, LANES, columns // pair, pair).transpose(0, 3, 1, 2, 4)
    return np.ascontiguousarray(pairs).reshape(panels, columns // pair, 2, LANES * pair)
