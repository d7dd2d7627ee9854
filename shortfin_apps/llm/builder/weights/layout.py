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
                        With `terms_in_bf16`, scales are bf16, and so are minima, which are then the values
                        of the quant MIDDLE
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

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.builder.quantise import quantise, quantise_fp8, quantise_rows
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.contract.gpu_code.chips import Fp8Type
from shortfin_apps.llm.model.block import Block
from shortfin_apps.llm.model.feed_forward import GatedExperts
from shortfin_apps.llm.model.layer_inputs import TABLE
from shortfin_apps.llm.model.operations import GatedLinear, Linear, ModelTensor
from shortfin_apps.llm.model.spec import (
    BuildOptions,
    FloatType,
    ModelSpec,
    WeightType,
    stacked_shape,
    weight_parts,
)
from shortfin_apps.llm.model.weight_blocks import BLOCK, MIDDLE, PAIR, Q4_1, Q8_0, Blocks, BlockType, Terms

LANES = 16  # output features of half a panel
PANEL = 2 * LANES  # output features of a panel
WORD = 4  # bytes
TILE = 64  # bytes along K of an AMX tile
DOT_BYTES = 4  # bytes of a column along K per integer dot product
MATRIX_BYTES = 8  # bytes along K per NEON matrix product (SMMLA)
EXPERTS = ("ffn_gate_up_exps.weight", "ffn_down_exps.weight")

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

    `terms_in_bf16`: store what kernels for NVIDIA GPUs multiply by, instead of groups too. It is for 4-bit
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
            middles = (minimum + MIDDLE * scales for minimum in minima)
            return [quants, *(cast_floats(terms, "bf16") for terms in (scales, *middles))]
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


@lru_cache(maxsize=64)
def linear_sizes(block: Block, hidden: int) -> frozenset[int] | None:
    """Return the dimensions of the matrices of a model's block, such as an attention or a feed-forward.

    None if another operation than Linear or GatedLinear reads one of the matrices. Gate and up count as two
    matrices.
    """
    sizes: set[int] = set()
    readers = {o.weight: o for o in block.operations(0, "x", "x") if isinstance(o, Linear | GatedLinear)}
    for name, parts in weight_parts(tensor.of_layer(0) for tensor in block.tensors(hidden)).items():
        rows, *columns = stacked_shape(parts)
        if not columns:
            continue
        if name not in readers or parts[0].stored != "weights":
            return None
        sizes |= {rows // 2 if isinstance(readers[name], GatedLinear) else rows, *columns}
    return frozenset(sizes)


def fills_panels(spec: ModelSpec) -> bool:
    """Whether the sizes of all matrices are multiples of 32, and only Linear and GatedLinear read them."""
    sizes = [linear_sizes(block, spec.hidden_size) for block in spec.blocks]
    inputs = {spec.layer_inputs.all_features} if spec.layer_inputs else set()
    own = frozenset({spec.hidden_size, spec.vocab_size, *inputs})
    return all(each is not None and all(size % PANEL == 0 for size in each) for each in (own, *sizes))


def fills_tiles(spec: ModelSpec, activations: FloatType, target: Target) -> bool:
    """Whether the CPU has AMX for these activations, and all matrices of the model are whole tiles.

    f16 activations need AMX with f16; bf16 activations need AMX with bf16 and int8, and AVX-512 VNNI.
    """
    in_bf16 = activations == "bf16" and target.has_amx_int8 and target.has_int8_dot
    in_f16 = activations == "f16" and target.has_amx_fp16
    return (in_bf16 or in_f16) and fills_panels(spec)


def multiplies_blocks(spec: ModelSpec, target: Target) -> bool:
    """Whether the CPU multiplies quantised blocks as integers, and the model's sizes allow it."""
    return target.multiplies_blocks and fills_panels(spec)


def multiplies_matrices(spec: ModelSpec, target: Target) -> bool:
    """Whether integers are multiplied with SMMLA, NEON's matrix products.

    Only the fused layer supports SMMLA.
    """
    return target.has_smmla and fills_panels(spec)


def multiplies_pairs(spec: ModelSpec, options: BuildOptions, target: Target) -> bool:
    """Whether float matmuls use dot products of bf16 pairs.

    On aarch64, only the fused layer supports these dot products.
    """
    has_dot = target.has_bf16_dot or (target.has_neon_bf16_dot and fills_panels(spec))
    return options.activations == "bf16" and has_dot


def experts_fill_tiles(spec: ModelSpec, options: BuildOptions, target: Target) -> bool:
    """Whether the CPU has AMX for the experts' bf16 or f16 matrices, and these consist of whole tiles."""
    has_tiles = {"bf16": target.has_amx, "f16": target.has_amx_fp16}.get(options.weights, False)
    if spec.experts is None or not has_tiles:
        return False
    in_blocks = any(name.endswith(EXPERTS) for name, _ in options.block_types)
    return not in_blocks and spec.hidden_size % PANEL == spec.experts.features % PANEL == 0


def weight_layout(name: str, spec: ModelSpec, options: BuildOptions, target: Target) -> WeightLayout:
    """Return the layout of the weight `name` that the target's kernels read."""
    tensor, gated = _weights_of(spec)[name]
    if len(tensor.shape) < 2:
        return RowMajor("f32")
    if tensor.stored == "taps":
        return Taps()
    if tensor.stored == "rows":
        return RowMajor(options.activations)
    if tensor.stored == "floats":
        options = replace(options, weights=options.activations)
    # Rows that are not whole blocks stay floats.
    made = made_blocks(name, options.weights) if tensor.shape[-1] % BLOCK == 0 else None
    blocks = dict(options.block_types).get(name, made)
    if not target.is_cpu:
        if options.weights == "fp8" and target.fp8 and name.startswith("blk."):  # no embedding or head
            return Fp8Rows(target.fp8)
        # Only Embed has a kernel that reads rows of blocks, not EmbedLayers.
        if blocks is None or name == TABLE:
            return RowMajor(options.activations)
        return block_rows(blocks, options.activations, target)
    pair = 2 if multiplies_pairs(spec, options, target) else 1
    byte_pair = MATRIX_BYTES if multiplies_matrices(spec, target) else DOT_BYTES
    block_pair = byte_pair if multiplies_blocks(spec, target) else pair
    if blocks is not None:
        widened = blocks.is_e2m1 and multiplies_blocks(spec, target)  # floats to integers
        return QuantisedPanels(Q8_0 if widened else blocks, block_pair, gated)
    match options.weights:
        case "int8":
            return Int8Panels(gated, byte_pair)
        case _ if fills_tiles(spec, options.activations, target):
            return TilePanels(options.activations, gated)
        case _ if name.endswith(EXPERTS) and experts_fill_tiles(spec, options, target):
            return TilePanels(options.activations, gated)
        case _:
            return Panels(options.activations, pair, gated)


def block_rows(blocks: BlockType, activations: FloatType, target: Target) -> BlockRows:
    """Return the layout of blocks for a GPU.

    Terms in bf16 take half a bit per weight more than those of groups. Blocks of fewer weights than 32 would
    take a whole bit or more.
    """
    are_integers = blocks.bits == 4 and blocks.size == BLOCK and not blocks.is_e2m1
    in_bf16 = target.architecture == "nvptx" and activations == "bf16"
    return BlockRows(blocks, terms_in_bf16=are_integers and in_bf16)


@lru_cache(maxsize=8)
def _weights_of(spec: ModelSpec) -> dict[str, tuple[ModelTensor, bool]]:
    """Map the name of each weight to its first tensor, and to whether the weight stacks gate and up."""
    gated = {o.weight for o in spec.all_operations() if isinstance(o, GatedLinear | GatedExperts)}
    return {name: (parts[0], name in gated) for name, parts in weight_parts(spec.tensors()).items()}


def made_blocks(name: str, weights: WeightType) -> BlockType | None:
    """Return the type of blocks that floats are quantised to; None for weight types without blocks."""
    match weights:
        case "q8_0":
            return Q8_0
        case "q4":
            # As in 4-bit GGUF files, embedding and head have 8 bits, because their errors cost most quality.
            return Q4_1 if name.startswith("blk.") else Q8_0
        case _:
            return None


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
