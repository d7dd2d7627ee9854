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
from shortfin_apps.llm.builder.kernels.interface import Regions
from shortfin_apps.llm.builder.weights.layout import PANEL
from shortfin_apps.llm.model.spec import FloatType


@dataclass(frozen=True, kw_only=True)
class MatmulFloatTilesGeometry(MatmulGeometry):
    """A bf16 or f16 matmul, by `dtype` (matmul_floats_function.mlir.j2).

    x is row-major or, if `is_tiled`, FloatTiles; `makes_tiles` selects the same for a gated result. With
    `has_bias`, sums start from their column's bias.
    """

    dtype: FloatType = "bf16"
    is_tiled: bool
    makes_tiles: bool = True
    has_bias: bool = False
    max_chunk_tiles: ClassVar[int] = 18  # tiles of a panel along K that stay in the L1 cache

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
    def out(self) -> FloatTiles:
        """The result's tiles, if gated."""
        return FloatTiles(self.out_features)

    @property
    def clamped_slope(self) -> float:
        """The slope in the exponent of 2."""
        return -CLAMPED_SLOPE * math.log2(math.e)

    @property
    def clamped_limit(self) -> float:
        return CLAMPED_LIMIT

    @property
    def panel_bias_bytes(self) -> int:
        """Bytes of the bias of a panel's columns, or of the gate's only."""
        return SUMS_ROW_BYTES // 2 if self.is_gated else SUMS_ROW_BYTES

    @property
    def second_bias_bytes(self) -> int:
        """Bytes from the bias of a panel's first half to the bias of its second."""
        return 4 * self.out_features if self.is_gated else SUMS_ROW_BYTES // 2

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a row of x per chunk: near-equal chunks of K."""
        tiles = self.row_bytes // TILE_ROW_BYTES
        chunks = -(-tiles // self.max_chunk_tiles)
        return TILE_ROW_BYTES * -(-tiles // chunks)

    @property
    def local(self) -> Regions:
        return Regions(
            {
                "config": CONFIG_BYTES,
                "zeros": 2 * TILE_ROW_BYTES,  # one row of sums
                "sums": self.row_block * SUMS_ROW_BYTES,
            }
        )


@dataclass(frozen=True, kw_only=True)
class MatmulInt8Geometry(MatmulBytesGeometry):
    """int8 with a scale per row and per column (matmul_int8_function.mlir.j2)."""

    max_chunk_tiles: ClassVar[int] = 12  # tiles of a panel along K that stay in the L1 cache

    @property
    def out(self) -> FloatTiles:
        """The result's tiles, if gated."""
        return FloatTiles(self.out_features)

    @property
    def chunks(self) -> int:
        return -(-self.x.tiles // self.max_chunk_tiles)

    @property
    def chunk_tiles(self) -> int:
        """Tiles along K of all chunks except the last."""
        return -(-self.x.tiles // self.chunks)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of sixteen rows of x per chunk."""
        return TILE_BYTES * self.chunk_tiles

    @property
    def finished_rows(self) -> int:
        """Rows of the previous block that every step of the last chunk writes out."""
        last_tiles = self.x.tiles - (self.chunks - 1) * self.chunk_tiles
        return -(-PANEL // last_tiles)

    @property
    def sums_rows(self) -> int:
        """Rows of sums; with one chunk, two blocks of rows alternate."""
        return self.row_block if self.chunks > 1 else 64

    @property
    def local(self) -> Regions:
        sums = self.sums_rows * SUMS_ROW_BYTES
        return Regions({"config": CONFIG_BYTES, "zeros": TILE_ROW_BYTES, "sums": sums})
