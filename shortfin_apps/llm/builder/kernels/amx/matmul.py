"""Geometry of the AMX matmuls out[rows, n] = x[rows, k_size] . w[n, k_size]^T in bf16, f16 and bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from shortfin_apps.llm.builder.kernels.activations import TILE_BYTES, TILE_ROW_BYTES, FloatTiles
from shortfin_apps.llm.builder.kernels.epilogue import CLAMPED_LIMIT, CLAMPED_SLOPE
from shortfin_apps.llm.builder.kernels.fused.matmul import (
    CONFIG_BYTES,
    SUMS_ROW_BYTES,
    MatmulBytesGeometry,
    MatmulGeometry,
)
from shortfin_apps.llm.builder.kernels.fused.panel_blocks import PanelBlocks
from shortfin_apps.llm.builder.kernels.interface import Regions
from shortfin_apps.llm.builder.weights.layout import PANEL
from shortfin_apps.llm.model.spec import FloatType
from shortfin_apps.llm.model.weight_blocks import BlockType


@dataclass(frozen=True, kw_only=True)
class MatmulFloatTilesGeometry(MatmulGeometry):
    """A matmul on AMX tiles in bf16 or f16, as `dtype` says (matmul_floats_function.mlir.j2).

    x is FloatTiles if `is_tiled`, otherwise row-major. A gated result is FloatTiles if `makes_tiles`,
    otherwise row-major. With `has_bias`, each sum starts from the bias of its column. Weights in `blocks` are
    widened to bf16, a chunk of K at a time.
    """

    dtype: FloatType = "bf16"
    is_tiled: bool
    makes_tiles: bool = True
    has_bias: bool = False
    blocks: BlockType | None = None
    max_chunk_tiles: ClassVar[int] = 18  # tiles of a panel along K that stay in the L1 cache
    max_widened_tiles: ClassVar[int] = 14  # the same, of tiles that are widened there

    @property
    def row_bytes(self) -> int:
        return 2 * self.k_size

    @property
    def w(self) -> PanelBlocks | None:
        return PanelBlocks(self.k_size, self.blocks) if self.blocks else None

    @property
    def panel_bytes(self) -> int:
        return self.w.panel_bytes if self.w else PANEL * self.row_bytes

    @property
    def x_stride(self) -> int:
        """Bytes between rows of a tile of x."""
        return TILE_ROW_BYTES if self.is_tiled else self.row_bytes

    @property
    def out(self) -> FloatTiles:
        """The layout of a gated result in tiles."""
        return FloatTiles(self.out_features)

    @property
    def clamped_slope(self) -> float:
        """The slope of the "clamped" activation for exp2: sigmoid = 1 / (1 + exp2(slope * gate))."""
        return -CLAMPED_SLOPE * math.log2(math.e)

    @property
    def clamped_limit(self) -> float:
        return CLAMPED_LIMIT

    @property
    def panel_bias_bytes(self) -> int:
        """Bytes of the bias of a panel's columns; if gated, only of its columns of gate."""
        return SUMS_ROW_BYTES // 2 if self.is_gated else SUMS_ROW_BYTES

    @property
    def second_bias_bytes(self) -> int:
        """Bytes from the bias of a panel's first half to the bias of its second half."""
        return 4 * self.out_features if self.is_gated else SUMS_ROW_BYTES // 2

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a row of x in a chunk of K; chunks are nearly equal."""
        tiles = self.row_bytes // TILE_ROW_BYTES
        chunks = -(-tiles // (self.max_widened_tiles if self.blocks else self.max_chunk_tiles))
        return TILE_ROW_BYTES * -(-tiles // chunks)

    @property
    def local(self) -> Regions:
        return Regions(
            {
                "config": CONFIG_BYTES,
                "zeros": 2 * TILE_ROW_BYTES,  # a row of initial sums
                "chunk_w": PANEL * self.chunk_bytes if self.blocks else 0,
                "sums": self.row_block * SUMS_ROW_BYTES,
            }
        )


@dataclass(frozen=True, kw_only=True)
class MatmulInt8Geometry(MatmulBytesGeometry):
    """An int8 matmul on AMX tiles (matmul_int8_function.mlir.j2).

    A scale per row of x and a scale per column turn sums into floats.
    """

    max_chunk_tiles: ClassVar[int] = 12  # tiles of a panel along K that stay in the L1 cache

    @property
    def out(self) -> FloatTiles:
        """The layout of a gated result in tiles."""
        return FloatTiles(self.out_features)

    @property
    def chunks(self) -> int:
        return -(-self.x.tiles // self.max_chunk_tiles)

    @property
    def chunk_tiles(self) -> int:
        """Tiles along K per chunk; the last chunk may have fewer."""
        return -(-self.x.tiles // self.chunks)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of sixteen rows of x in a chunk of K."""
        return TILE_BYTES * self.chunk_tiles

    @property
    def finished_rows(self) -> int:
        """Rows of the previous block of rows that each step (tile along K) of the last chunk writes out."""
        last_tiles = self.x.tiles - (self.chunks - 1) * self.chunk_tiles
        return -(-PANEL // last_tiles)

    @property
    def sums_rows(self) -> int:
        """Rows of sums in memory: a work item's or, with one chunk, two blocks of 32 that alternate."""
        return self.row_block if self.chunks > 1 else 64

    @property
    def local(self) -> Regions:
        sums = self.sums_rows * SUMS_ROW_BYTES
        return Regions({"config": CONFIG_BYTES, "zeros": TILE_ROW_BYTES, "sums": sums})
