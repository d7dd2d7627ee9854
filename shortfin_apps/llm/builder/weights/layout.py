"""Layouts of weights in the parameter file: row by row, or in the panels that the CPU kernels read.

A weight [out, in] is one logical matrix. A panel holds 32 of its output features, so that a kernel reads one
forward stream. `pair` neighbours along K stay together, as many as a dot product adds (2 of bf16, 4 of
bytes), or 1:

    BlockRows(8)        name           [out, K] i8
                        name.scales    [out, K / 32] f16
    BlockRows(4)        name           [out, K / 2] i8: two neighbours a byte, the first in its low bits
                        name.scales    [out, K / 32] f16
                        name.minima    [out, K / 32] f16
    Fp8Rows             name           [out, K] of the target's 8-bit floats
                        name.scales    [out] f32
    Panels              name           [panels, K / pair, 32 * pair]
    QuantisedPanels(8)  name           [panels, K / pair, 32 * pair] i8
                        name.scales    [panels, K / 32, 32] f16
    QuantisedPanels(4)  name           [panels, K / pair, 16 * pair] i8: byte j has element j of the panel's
                                       first half in its low bits and of its second half in its high bits
                        name.scales    [panels, K / 32, 2, 32] f16: scales, then minima
    TilePanels          name           [panels, K / 32, 2, 16, 32] bf16: AMX tiles of each half, of 16 pairs
    Int8Panels          name           [panels, K / 64, 2, 16, 64] i8: AMX tiles of each half, of 16 fours
                        name.scales    [panels, 32] f32

A panel's halves are 16 features each: neighbours, or, where `gated`, of gate and of up, which the matrix
stacks. What is missing in the last panel or tile is zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.builder.model.spec import BuildOptions, FloatType, ModelSpec
from shortfin_apps.llm.builder.quantise import BLOCK, Bits, Blocks, quantise, quantise_fp8, quantise_rows
from shortfin_apps.llm.builder.target import Fp8Type, Target

LANES = 16  # output features of half a panel
PANEL = 2 * LANES  # output features of a panel
TILE = 64  # bytes along K of an AMX tile

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
    """Layout of one weight in the parameter file; `name` is the weight's and `shape` its matrix's."""

    @property
    def bits(self) -> Bits | None:
        """Bits of a weight in quantised blocks, else None."""
        ...

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredTypes:
        """The parameters' shapes and types, in the order in which kernels read them."""
        ...

    def store(self, value: Array | Blocks) -> list[Array]:
        """The parameters' values. A quantised layout takes blocks of its bits, or floats to quantise."""
        ...


@dataclass(frozen=True, slots=True)
class RowMajor:
    """Implements WeightLayout: the matrix row by row."""

    dtype: FloatType
    bits: None = None

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredTypes:
        return {name: (shape, self.dtype)}

    def store(self, value: Array | Blocks) -> list[Array]:
        assert not isinstance(value, Blocks)
        return [cast_floats(value, self.dtype)]


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Implements WeightLayout: quantised blocks row by row, for GPUs."""

    bits: Bits

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredTypes:
        rows, columns = shape
        scales = (rows, columns // BLOCK)
        types: StoredTypes = {
            name: ((rows, columns * self.bits // 8), "i8"),
            f"{name}.scales": (scales, "f16"),
        }
        return types | ({f"{name}.minima": (scales, "f16")} if self.bits == 4 else {})

    def store(self, value: Array | Blocks) -> list[Array]:
        blocks = value if isinstance(value, Blocks) else quantise(value, self.bits)
        assert blocks.bits == self.bits
        if blocks.minima is None:
            return [blocks.quants, blocks.scales]
        packed = blocks.quants[:, 0::2] | blocks.quants[:, 1::2] << 4
        return [packed.view(np.int8), blocks.scales, blocks.minima]


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Implements WeightLayout: 8-bit floats row by row and a scale for each output feature, for GPUs."""

    dtype: Fp8Type
    bits: None = None

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredTypes:
        return {name: (shape, self.dtype), f"{name}.scales": ((shape[0],), "f32")}

    def store(self, value: Array | Blocks) -> list[Array]:
        assert not isinstance(value, Blocks)
        return list(quantise_fp8(value, FP8_DTYPES[self.dtype]))


@dataclass(frozen=True, slots=True)
class Panels:
    """Implements WeightLayout: floats in panels."""

    dtype: FloatType
    pair: int
    gated: bool
    bits: None = None

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredTypes:
        return {name: ((num_panels(shape[0]), shape[1] // self.pair, PANEL * self.pair), self.dtype)}

    def store(self, value: Array | Blocks) -> list[Array]:
        assert not isinstance(value, Blocks)
        halves = _halves(cast_floats(value, self.dtype), self.gated)
        return [_interleave(halves, self.pair).reshape(len(halves), -1, PANEL * self.pair)]


@dataclass(frozen=True, slots=True)
class TilePanels:
    """Implements WeightLayout: bf16 in AMX tiles, all of which the matrix must fill."""

    gated: bool
    bits: None = None

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredTypes:
        return {name: ((num_panels(shape[0]), shape[1] // (2 * LANES), 2, LANES, 2 * LANES), "bf16")}

    def store(self, value: Array | Blocks) -> list[Array]:
        assert not isinstance(value, Blocks)
        return [_tile(_halves(cast_floats(value, "bf16"), self.gated), 2)]


@dataclass(frozen=True, slots=True)
class QuantisedPanels:
    """Implements WeightLayout: quantised blocks in panels."""

    bits: Bits
    pair: int
    gated: bool

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredTypes:
        panels, columns = num_panels(shape[0]), shape[1]
        blocks = columns // BLOCK
        elements = PANEL * self.pair * self.bits // 8
        terms = (2,) if self.bits == 4 else ()
        return {
            name: ((panels, columns // self.pair, elements), "i8"),
            f"{name}.scales": ((panels, blocks, *terms, PANEL), "f16"),
        }

    def store(self, value: Array | Blocks) -> list[Array]:
        blocks = value if isinstance(value, Blocks) else quantise(value, self.bits)
        assert blocks.bits == self.bits
        terms = [blocks.scales] if blocks.minima is None else [blocks.scales, blocks.minima]
        # [panels, halves, lanes, blocks] each, to [panels, blocks, (terms,) halves * lanes]
        columns = [_halves(t, self.gated).transpose(0, 3, 1, 2) for t in terms]
        flat = [c.reshape(*c.shape[:2], PANEL) for c in columns]
        scales = flat[0] if len(flat) == 1 else np.stack(flat, axis=2)
        return [self._pack(blocks.quants), np.ascontiguousarray(scales)]

    def _pack(self, quants: Array) -> Array:
        halves = _interleave(_halves(quants, self.gated), self.pair)
        if self.bits == 4:
            halves = (halves[:, :, 0] | halves[:, :, 1] << 4)[:, :, None]
        return halves.reshape(*halves.shape[:2], -1).view(np.int8)


@dataclass(frozen=True, slots=True)
class Int8Panels:
    """Implements WeightLayout: bytes in AMX tiles and a scale for each output feature, for int8."""

    gated: bool
    bits: None = None

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredTypes:
        panels, tiles = num_panels(shape[0]), num_tiles(shape[1])
        return {
            name: ((panels, tiles, 2, LANES, TILE), "i8"),
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
            _tile(tiles, 4),
            _halves(scales[:, None], self.gated).reshape(panels, PANEL),
        ]


def fills_tiles(spec: ModelSpec, target: Target) -> bool:
    """Whether the CPU has AMX with int8 and all matrices of the model are whole tiles."""
    heads = spec.num_attention_heads * spec.head_dim
    sizes = (spec.hidden_size, spec.intermediate_size, spec.qkv_features, spec.vocab_size, heads)
    return target.has_amx_int8 and target.has_int8_dot and all(size % PANEL == 0 for size in sizes)


def weight_layout(name: str, spec: ModelSpec, options: BuildOptions, target: Target) -> WeightLayout:
    """The layout of the weight `name` that the target's kernels read."""
    if name.endswith(("norm.weight", ".bias")):
        return RowMajor("f32")
    bits = _block_bits(name, options)
    if not target.is_cpu:
        if options.weights == "fp8" and target.fp8 and name.startswith("blk."):  # not embedding and head
            return Fp8Rows(target.fp8)
        return RowMajor(options.activations) if bits is None else BlockRows(bits)
    pair = 2 if options.activations == "bf16" and target.has_bf16_dot else 1
    block_pair = 4 if fills_tiles(spec, target) else pair
    gated = name.endswith("ffn_gate_up.weight")
    if bits is not None:
        return QuantisedPanels(bits, block_pair, gated)
    match options.weights:
        case "int8":
            return Int8Panels(gated)
        case "bf16" if fills_tiles(spec, target):
            return TilePanels(gated)
        case _:
            return Panels(options.activations, pair, gated)


def _block_bits(name: str, options: BuildOptions) -> Bits | None:
    """The bits of a matrix's quants; None if it is not in blocks."""
    match options.weights:
        case "q8_0":
            return 8
        case "q4":
            # As in GGUF files of 4 bits, embedding and head keep 8: their errors cost the most.
            return 4 if name.startswith("blk.") and name not in options.finer_weights else 8
        case _:
            return None


def num_panels(out_features: int) -> int:
    return -(-out_features // PANEL)


def num_tiles(in_features: int) -> int:
    return -(-in_features // TILE)


def cast_floats(value: Array, dtype: FloatType) -> Array:
    """`value` as `dtype`; f16 saturates."""
    if dtype != "f16":
        return value.astype(FLOAT_DTYPES[dtype], copy=False)
    largest = np.finfo(np.float16).max
    return np.clip(value.astype(np.float32, copy=False), -largest, largest).astype(np.float16)


def _halves(matrix: Array, gated: bool) -> Array:
    """[out, columns] -> [panels, 2, lanes, columns]."""
    rows, columns = matrix.shape
    if gated:
        return matrix.reshape(2, rows // 2 // LANES, LANES, columns).swapaxes(0, 1)
    padded = np.zeros((num_panels(rows) * PANEL, columns), matrix.dtype)
    padded[:rows] = matrix
    return padded.reshape(-1, 2, LANES, columns)


def _tile(halves: Array, pair: int) -> Array:
    """[panels, 2, lanes, K] -> [panels, tiles, 2, 16 steps along K, lanes * pair]."""
    panels = len(halves)
    ordered = halves.reshape(panels, 2, LANES, -1, LANES, pair).transpose(0, 3, 1, 4, 2, 5)
    return np.ascontiguousarray(ordered).reshape(panels, -1, 2, LANES, LANES * pair)


def _interleave(halves: Array, pair: int) -> Array:
    """[panels, 2, lanes, K] -> [panels, K / pair, 2, lanes * pair]."""
    panels, _, _, columns = halves.shape
    pairs = halves.reshape(panels, 2, LANES, columns // pair, pair).transpose(0, 3, 1, 2, 4)
    return np.ascontiguousarray(pairs).reshape(panels, columns // pair, 2, LANES * pair)
