"""Read the formats of quantised matrices in Hugging Face directories, as `quantization_config` names them.

GPTQ, AWQ and compressed-tensors store 4-bit integers q, eight per 32-bit word. A weight is `scale * (q -
zero)`, where a group of input features shares a scale and a zero point. 8-bit floats have a scale for the
matrix, for each output feature, or for each tile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, PositiveInt, field_validator

from shortfin_apps.llm.builder.sources.base import Array, parse, unsupported
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.weight_blocks import BLOCK, Blocks, BlockType, Terms

Shape = tuple[int, ...]
Quants = npt.NDArray[np.uint8]

_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_IN_WORD = 8  # 4-bit integers per 32-bit word
_IN_ORDER = tuple(range(_IN_WORD))
_GPTQ_ADDED = {"gptq": 1, "gptq_v2": 0}  # `checkpoint_format` -> value added to stored zero points
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # position of each integer in its word


class MatrixFormat(ABC):
    """The storage format of a matrix [out, in] in several tensors, named `MATRIX.SUFFIX`."""

    name: ClassVar[str]  # for users
    marks: ClassVar[tuple[str, ...]]  # suffixes of which every matrix in this format has at least one
    needed: ClassVar[tuple[str, ...]]  # suffixes of required tensors, which are matrices
    others: ClassVar[tuple[str, ...]] = ()  # suffixes of optional tensors

    @abstractmethod
    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """Return the matrix's shape, given the shapes of its tensors by suffix."""

    def block_type(self, in_features: int) -> BlockType | None:
        """Return the block type of a matrix with `in_features` columns; None for floats."""
        return None

    def blocks(self, where: str, tensors: Mapping[str, Array]) -> Blocks | None:
        """Return the matrix's blocks; None for floats. Raises BuildError."""
        return None

    @abstractmethod
    def values(self, where: str, tensors: Mapping[str, Array]) -> Array:
        """Return the matrix in f32. Raises BuildError."""


@dataclass(frozen=True)
class _Int4(MatrixFormat):
    """4-bit integers in groups of `group` input features; None: all input features are one group."""

    group: int | None

    def block_type(self, in_features: int) -> BlockType | None:
        return BlockType(4, has_minima=True, group=self.group or in_features)

    def values(self, where: str, tensors: Mapping[str, Array]) -> Array:
        return self.blocks(where, tensors).dequantise()

    @abstractmethod
    def blocks(self, where: str, tensors: Mapping[str, Array]) -> Blocks: ...

    def _made(self, where: str, quants: Quants, scales: Array, zeros: Array) -> Blocks:
        """Create blocks from `quants` [out, in], and `scales` and zero points `zeros` [out, in / group]."""
        columns = quants.shape[1]
        group = self.group or columns
        if group % BLOCK or columns % group:
            raise unsupported(where, f"{columns} input features in groups of {group}")
        for terms in (scales, zeros):
            if terms.shape != (len(quants), columns // group):
                raise BuildError(f"{where} has scales or zeros of shape {terms.shape} for groups of {group}")
        narrow = scales.astype(np.float16)
        if not np.isfinite(narrow).all():
            raise BuildError(f"{where} has scales that are not finite in f16; the file is damaged")
        of_blocks = np.repeat(zeros.astype(np.int8), group // BLOCK, axis=1)
        kind = BlockType(4, has_minima=True, group=group)
        return Blocks(kind, quants, Terms(narrow, np.ones_like(of_blocks)), Terms(narrow, -of_blocks))

    def _check_order(self, where: str, tensors: Mapping[str, Array], name: str) -> None:
        """Raise BuildError if groups are not adjacent features, by the tensor `name` (feature -> group)."""
        of_feature = tensors.get(name)
        if of_feature is None:
            return
        group = self.group or len(of_feature)
        if not np.array_equal(of_feature, np.arange(len(of_feature)) // group):
            raise unsupported(where, "a quantisation that reorders input features (`desc_act`, `actorder`)")


@dataclass(frozen=True)
class Gptq(_Int4):
    """GPTQ: `qweight` [in / 8, out], `qzeros` [in / group, out / 8], `scales` [in / group, out].

    A zero point is its stored value plus `added`, which is 1 in the first version of the format.
    """

    added: int
    name = "GPTQ"
    marks = ("qweight",)
    needed = ("qweight", "qzeros", "scales")
    others = ("g_idx",)

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        words, out = shapes["qweight"]
        return out, words * _IN_WORD

    def blocks(self, where: str, tensors: Mapping[str, Array]) -> Blocks:
        self._check_order(where, tensors, "g_idx")
        zeros = _unpacked(tensors["qzeros"]).T + np.uint8(self.added)
        return self._made(where, _unpacked(tensors["qweight"].T), tensors["scales"].T, zeros)


@dataclass(frozen=True)
class Awq(_Int4):
    """AWQ: `qweight` [in, out / 8], `qzeros` [in / group, out / 8], `scales` [in / group, out]."""

    name = "AWQ"
    marks = ("qweight",)
    needed = ("qweight", "qzeros", "scales")

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        columns, words = shapes["qweight"]
        return words * _IN_WORD, columns

    def blocks(self, where: str, tensors: Mapping[str, Array]) -> Blocks:
        quants, zeros = (_unpacked(tensors[name], _AWQ_ORDER).T for name in ("qweight", "qzeros"))
        return self._made(where, np.ascontiguousarray(quants), tensors["scales"].T, zeros)


@dataclass(frozen=True)
class PackedInt4(_Int4):
    """compressed-tensors: `weight_packed` [out, in / 8], `weight_scale` [out, in / group].

    The optional `weight_zero_point` [out / 8, in / group] is packed, too; without it, all zero points are 8.
    """

    name = "compressed-tensors int4"
    marks = ("weight_packed",)
    needed = ("weight_packed", "weight_scale")
    others = ("weight_zero_point", "weight_shape", "weight_g_idx")

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        out, words = shapes["weight_packed"]
        return out, words * _IN_WORD

    def blocks(self, where: str, tensors: Mapping[str, Array]) -> Blocks:
        self._check_order(where, tensors, "weight_g_idx")
        quants, scales = _unpacked(tensors["weight_packed"]), tensors["weight_scale"]
        if not np.array_equal(tensors.get("weight_shape", quants.shape), quants.shape):
            raise unsupported(where, "a matrix whose rows are padded")
        return self._made(where, quants, scales, self._zeros(tensors, scales.shape))

    def _zeros(self, tensors: Mapping[str, Array], shape: Shape) -> Array:
        zeros = tensors.get("weight_zero_point")
        if zeros is None:
            return np.full(shape, _IN_WORD, np.uint8)
        # Early versions store zero points unpacked, as signed integers without the offset of 8.
        return zeros + np.int8(8) if zeros.dtype == np.int8 else _unpacked(zeros.T).T


@dataclass(frozen=True)
class Fp8(MatrixFormat):
    """8-bit floats: `weight` [out, in] in E4M3, to be multiplied by `weight_scale` or `weight_scale_inv`.

    There is one scale for the matrix, or one per output feature, or one per `tile`. Tiles at the end of a
    dimension may be partial.
    """

    tile: tuple[int, int] | None
    name = "fp8"
    marks = ("weight_scale", "weight_scale_inv")
    needed = ("weight",)
    others = ("input_scale", "activation_scale")

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        return shapes["weight"]

    def values(self, where: str, tensors: Mapping[str, Array]) -> Array:
        weight = tensors["weight"]
        if weight.dtype != _FP8:
            raise unsupported(where, f"8-bit floats of type {weight.dtype}")
        scale = next(tensors[mark] for mark in self.marks if mark in tensors).astype(np.float32)
        return weight.astype(np.float32) * self._spread(where, scale, weight.shape)

    def _spread(self, where: str, scale: Array, shape: Shape) -> Array:
        """Expand the scales so that they broadcast to a matrix of `shape`."""
        rows, columns = shape
        if scale.size == 1:
            return scale.reshape(1, 1)
        if scale.shape in ((rows,), (rows, 1)):
            return scale.reshape(rows, 1)
        if self.tile is None:
            raise unsupported(where, f"scales of shape {scale.shape}")
        if scale.shape != (-(-rows // self.tile[0]), -(-columns // self.tile[1])):
            raise unsupported(where, f"scales of shape {scale.shape} for tiles of {self.tile}")
        return scale.repeat(self.tile[0], axis=0)[:rows].repeat(self.tile[1], axis=1)[:, :columns]


def _unpacked(words: Array, places: tuple[int, ...] = _IN_ORDER) -> Quants:
    """Unpack 4-bit integers: `words` [.., n] of 32 bits -> [.., 8 * n].

    Integer i of a word is in bits 4 * places[i] and up.
    """
    shifts = np.array(places, np.uint32) * 4
    four = np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts & 15
    return four.astype(np.uint8).reshape(*words.shape[:-1], -1)


# Of a directory with 8-bit floats whose configuration names no format: scales are recognised by their shape.
UNDECLARED_FP8 = Fp8((128, 128))


class _Weights(BaseModel):
    """The field `weights` of a `config_groups` item of compressed-tensors."""

    num_bits: int
    type: str = "int"
    strategy: str | None = None
    group_size: int | None = None
    block_structure: tuple[PositiveInt, PositiveInt] | None = None

    @field_validator("block_structure", mode="before")
    @classmethod
    def _sizes(cls, value: object) -> object:
        """Read the older form "128x128"."""
        return value.split("x") if isinstance(value, str) else value


class _Group(BaseModel):
    weights: _Weights | None = None
    format: str | None = None


class _Config(BaseModel):
    model_config = ConfigDict(extra="ignore")

    quant_method: str
    bits: int | None = None
    group_size: int | None = None
    checkpoint_format: str = "gptq"
    version: str = "gemm"
    fmt: str = "e4m3"
    weight_block_size: tuple[PositiveInt, PositiveInt] | None = None
    format: str | None = None
    config_groups: dict[str, _Group] = {}
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None

    @property
    def stored(self) -> str | None:
        """The format of compressed-tensors, of all groups or of each."""
        formats = {group.format for group in self.config_groups.values()}
        [of_groups] = formats if len(formats) == 1 else {None}
        return of_groups or self.format

    @property
    def changes_activations(self) -> bool:
        """Whether the model computes something that other weights do not have."""
        is_sparse = (self.sparsity_config or {}).get("format", "dense") != "dense"
        return is_sparse or bool((self.transform_config or {}).get("config_groups"))


def matrix_format(where: str, raw: dict[str, Any] | None) -> MatrixFormat | None:
    """Return the format that `raw`, the `quantization_config`, names; None if `raw` is None.

    Raises BuildError naming the format if it is not supported.
    """
    if raw is None:
        return None
    config = parse(f"{where}/config.json: quantization_config", _Config, raw)
    if (made := _format_of(config)) is None:
        raise BuildError(
            f"{where}: weights quantised by {_described(config)} are not supported; give the model in "
            "floats, in a GGUF file, or quantised by GPTQ, AWQ or compressed-tensors to 4 bits, or to fp8"
        )
    return made


def _format_of(config: _Config) -> MatrixFormat | None:
    match config.quant_method:
        case "gptq" if config.bits == 4 and config.checkpoint_format in _GPTQ_ADDED:
            return Gptq(_group(config.group_size), _GPTQ_ADDED[config.checkpoint_format])
        case "awq" if config.bits == 4 and config.version.lower() == "gemm":
            return Awq(_group(config.group_size))
        case "fp8" if config.fmt == "e4m3":
            return Fp8(config.weight_block_size)
        case "compressed-tensors" if not config.changes_activations:
            return _compressed_tensors(config)
    return None


def _compressed_tensors(config: _Config) -> MatrixFormat | None:
    kinds = [group.weights for group in config.config_groups.values() if group.weights is not None]
    if not kinds or any(kind != kinds[0] for kind in kinds):
        return None
    kind = kinds[0]
    match config.stored, kind.type, kind.num_bits, kind.strategy:
        case "pack-quantized", "int", 4, "group" | "channel":
            return PackedInt4(_group(kind.group_size))
        case "float-quantized" | "naive-quantized", "float", 8, "tensor" | "channel":
            return Fp8(None)
        case "float-quantized", "float", 8, "block" if kind.block_structure:
            return Fp8(kind.block_structure)
    return None


def _group(size: int | None) -> int | None:
    """Return the group size; None for None or -1, which mean that all input features are one group."""
    return None if size is None or size < 0 else size


def _described(config: _Config) -> str:
    method = f"`{config.quant_method}`"
    kinds = {
        f"{group.weights.type}{group.weights.num_bits}"
        for group in config.config_groups.values()
        if group.weights
    }
    details = [
        *([f"{config.bits} bits"] if config.bits else []),
        *([f"format {config.stored}"] if config.stored else []),
        *(["sparse or transformed"] if config.changes_activations else []),
        *sorted(kinds),
        *([f"version {config.version}"] if config.quant_method == "awq" else []),
    ]
    return f"{method} ({', '.join(details)})" if details else method
