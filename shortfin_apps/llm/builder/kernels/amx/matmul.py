"""Geometry of the AMX matmuls out[rows, n] = x[rows, k_size] . w[n, k_size]^T, one class for each kernel."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from shortfin_apps.llm.builder.blocks import BLOCK, BlockType
from shortfin_apps.llm.builder.kernels.activations import (
    TILE_BYTES,
    TILE_ROW_BYTES,
    Bf16Tiles,
    Int8Blocks,
    Int8Tiles,
)
from shortfin_apps.llm.builder.kernels.amx.regions import Regions
from shortfin_apps.llm.builder.kernels.amx.stages import QuantiseBlocksGeometry
from shortfin_apps.llm.builder.kernels.epilogue import CLAMPED_LIMIT, CLAMPED_SLOPE, Epilogue, is_gated
from shortfin_apps.llm.builder.weights.layout import PANEL, group_bytes

_ROW_BLOCK_BYTES = 768 << 10  # rows of a work item, which stay in the L2 cache beside its weights
_MAX_ROWS = 512
_MAX_ITEM_BYTES = 256 << 10  # weights of a work item: about what is lost when the last one ends late
_MIN_ITEMS = 48
_CONFIG_BYTES = 64  # the operand of LDTILECFG
_SUMS_ROW_BYTES = 4 * PANEL


@dataclass(frozen=True, kw_only=True)
class MatmulGeometry(ABC):
    """Sizes that the three share. If gated, panels hold 16 columns of gate and of up, out n / 2."""

    n: int
    k_size: int
    epilogue: Epilogue
    sums_row_bytes: ClassVar[int] = _SUMS_ROW_BYTES

    @property
    @abstractmethod
    def panel_bytes(self) -> int:
        """Weights of 32 columns."""

    @property
    @abstractmethod
    def local(self) -> Regions:
        """Memory that the caller of the function allocates."""

    @property
    def is_gated(self) -> bool:
        return is_gated(self.epilogue)

    @property
    def panels(self) -> int:
        return self.n // PANEL

    @property
    def out_features(self) -> int:
        return self.n // 2 if self.is_gated else self.n

    @property
    def out_row_bytes(self) -> int:
        """Row by row: bf16 if gated, else f32."""
        return self.out_features * (2 if self.is_gated else 4)

    @property
    def panel_out_bytes(self) -> int:
        return self.out_row_bytes // self.panels

    @property
    def cached_row_bytes(self) -> int:
        """Bytes of a row of x that `row_block` allows for."""
        return 2 * self.k_size

    @property
    def row_block(self) -> int:
        """Most rows of a work item."""
        rows = _ROW_BLOCK_BYTES // self.cached_row_bytes // PANEL * PANEL
        return max(PANEL, min(rows, _MAX_ROWS))

    @property
    def panels_per_item(self) -> int:
        panels = min(self.panels // _MIN_ITEMS, _MAX_ITEM_BYTES // self.panel_bytes)
        # Two gated panels fill a row of a tile, which two workers had better not share.
        return max(2, panels // 2 * 2) if self.is_gated else max(1, panels)

    @property
    def column_groups(self) -> int:
        """Groups of `panels_per_item` panels."""
        return -(-self.panels // self.panels_per_item)


@dataclass(frozen=True, kw_only=True)
class MatmulBf16Geometry(MatmulGeometry):
    """bf16 (matmul_bf16_function.mlir.j2); x row by row, or where `is_tiled`, as Bf16Tiles.

    So is what a gated one makes, by `makes_tiles`. With `has_bias` sums begin with that of their column.
    """

    is_tiled: bool
    makes_tiles: bool = True
    has_bias: bool = False
    max_chunk_tiles: ClassVar[int] = 18  # of a panel along K, which stay in the L1 cache

    @property
    def row_bytes(self) -> int:
        return 2 * self.k_size

    @property
    def panel_bytes(self) -> int:
        return PANEL * self.row_bytes

    @property
    def x_stride(self) -> int:
        """Bytes between rows of a tile of x."""
        return TILE_ROW_BYTES if self.is_tiled else self.row_bytes

    @property
    def out(self) -> Bf16Tiles:
        """If gated."""
        return Bf16Tiles(self.out_features)

    @property
    def clamped_slope(self) -> float:
        """Of the exponent of 2."""
        return -CLAMPED_SLOPE * math.log2(math.e)

    @property
    def clamped_limit(self) -> float:
        return CLAMPED_LIMIT

    @property
    def panel_bias_bytes(self) -> int:
        """Bias of a panel's columns, or of gate's alone."""
        return _SUMS_ROW_BYTES // 2 if self.is_gated else _SUMS_ROW_BYTES

    @property
    def second_bias_bytes(self) -> int:
        """From the bias of a panel's first half to that of its second."""
        return 4 * self.out_features if self.is_gated else _SUMS_ROW_BYTES // 2

    @property
    def chunk_bytes(self) -> int:
        """Near-equal chunks of K, in bytes of a row of x."""
        tiles = self.row_bytes // TILE_ROW_BYTES
        chunks = -(-tiles // self.max_chunk_tiles)
        return TILE_ROW_BYTES * -(-tiles // chunks)

    @property
    def local(self) -> Regions:
        return Regions(
            {
                "config": _CONFIG_BYTES,
                "zeros": 2 * TILE_ROW_BYTES,  # one row of sums
                "sums": self.row_block * _SUMS_ROW_BYTES,
            }
        )


@dataclass(frozen=True, kw_only=True)
class MatmulInt8Geometry(MatmulGeometry):
    """int8 with a scale for each row and column (matmul_int8_function.mlir.j2)."""

    max_chunk_tiles: ClassVar[int] = 12  # of a panel along K, which stay in the L1 cache

    @property
    def x(self) -> Int8Tiles:
        return Int8Tiles(self.k_size)

    @property
    def cached_row_bytes(self) -> int:
        return self.x.row_bytes

    @property
    def panel_bytes(self) -> int:
        return PANEL * self.cached_row_bytes

    @property
    def out(self) -> Bf16Tiles:
        """If gated."""
        return Bf16Tiles(self.out_features)

    @property
    def chunks(self) -> int:
        return -(-self.x.tiles // self.max_chunk_tiles)

    @property
    def chunk_tiles(self) -> int:
        """Tiles along K of all chunks but the last."""
        return -(-self.x.tiles // self.chunks)

    @property
    def chunk_bytes(self) -> int:
        """In bytes of sixteen rows of x."""
        return TILE_BYTES * self.chunk_tiles

    @property
    def finished_rows(self) -> int:
        """Rows of the block before that every step of the last chunk writes out."""
        last_tiles = self.x.tiles - (self.chunks - 1) * self.chunk_tiles
        return -(-PANEL // last_tiles)

    @property
    def sums_rows(self) -> int:
        """With one chunk, two blocks of rows take turns."""
        return self.row_block if self.chunks > 1 else 64

    @property
    def local(self) -> Regions:
        sums = self.sums_rows * _SUMS_ROW_BYTES
        return Regions({"config": _CONFIG_BYTES, "zeros": TILE_ROW_BYTES, "sums": sums})


@dataclass(frozen=True, kw_only=True)
class MatmulBlockInt8Geometry(MatmulGeometry):
    """Weights in `blocks` of 16 or 32 (matmul_block_int8_function.mlir.j2); x has blocks of 32.

    A part is what a block of the weights has of one of x: all of it, or a half. With AMX, vectors are wide
    and there are instructions that round to bf16 and that multiply bytes without sign by such with one.
    """

    blocks: BlockType
    has_bf16: bool = True
    has_wide_vectors: bool = True
    has_dot: bool = True
    max_chunk_blocks: ClassVar[int] = 20  # of a panel along K, which stay in the L1 cache

    @property
    def x(self) -> Int8Blocks:
        return Int8Blocks(self.k_size)

    @property
    def quantise(self) -> QuantiseBlocksGeometry:
        """The quantisation of `out`, if gated."""
        return QuantiseBlocksGeometry(
            self.out_features, is_tiled=False, has_wide_vectors=self.has_wide_vectors
        )

    @property
    def is_shifted(self) -> bool:
        """Whether vectors take weights as q + 128, without sign."""
        return self.blocks.bits == 8 and self.has_dot

    @property
    def parts(self) -> int:
        """Of a block of x."""
        return BLOCK // self.blocks.size

    @property
    def paired_blocks(self) -> int:
        """All blocks of K, but for an odd one at its end."""
        return self.x.blocks // 2 * 2

    @property
    def chunk_blocks(self) -> int:
        """Near-equal chunks of K, of an even number of blocks."""
        pairs = self.x.blocks // 2
        chunks = max(1, -(-2 * pairs // self.max_chunk_blocks))
        return 2 * max(1, -(-pairs // chunks))

    @property
    def block_bytes(self) -> int:
        """Quants of a block of 32 columns."""
        return PANEL * BLOCK * self.blocks.bits // 8

    @property
    def part_w_bytes(self) -> int:
        """Quants of a part of 32 columns, a byte each."""
        return PANEL * self.blocks.size

    @property
    def panel_bytes(self) -> int:
        return PANEL * self.k_size * self.blocks.bits // 8

    @property
    def own_terms_bytes(self) -> int:
        """Terms of a part's own, of 32 columns: f16, or in groups i8."""
        return PANEL * self.blocks.num_terms * (1 if self.blocks.group else 2)

    @property
    def group_parts(self) -> int:
        """Parts that share an f16 for each term."""
        assert self.blocks.group is not None
        return self.blocks.group // self.blocks.size

    @property
    def group_bytes(self) -> int:
        """Terms of a group of 32 columns: the f16 that it shares, then each part's own."""
        return group_bytes(self.blocks)

    @property
    def group_head_bytes(self) -> int:
        """The f16 that a group shares."""
        return self.group_bytes - self.group_parts * self.own_terms_bytes

    def shift_past(self, part: int) -> int:
        """Bytes from a row's scale of a block to its shift of a part."""
        return self.x.shifts_at - self.x.scales_at + self._stat_of(part)

    def sum_past(self, part: int) -> int:
        """Bytes from there to its sum of a part."""
        return self.x.sums_at - self.x.scales_at + self._stat_of(part)

    def _stat_of(self, part: int) -> int:
        return 0 if self.parts == 1 else (1 + part) * self.x.stat_bytes

    @property
    def panel_terms_bytes(self) -> int:
        if self.blocks.group is None:
            return self.x.blocks * self.terms_bytes
        return self.k_size // self.blocks.group * self.group_bytes

    @property
    def terms_bytes(self) -> int:
        """Terms of a block of x, of 32 columns; in groups their average, rounded down."""
        if self.blocks.group is None:
            return self.parts * self.own_terms_bytes
        return BLOCK * self.group_bytes // self.blocks.group

    @property
    def local(self) -> Regions:
        return Regions(
            {
                "config": _CONFIG_BYTES,
                "products": self.parts * TILE_BYTES,
                "chunk_w": self.chunk_blocks * TILE_BYTES if self.blocks.bits == 4 else 0,
                "sums": self.row_block * _SUMS_ROW_BYTES,
            }
        )
