"""Geometry of activations that matmuls read sixteen rows at a time.

They are in tiles of bf16 or f16 (AMX) or of bytes, or in blocks of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shortfin_apps.llm.model.weight_blocks import BLOCK

TILE_ROWS = 16
TILE_ROW_BYTES = 64
TILE_BYTES = TILE_ROWS * TILE_ROW_BYTES


@dataclass(frozen=True, slots=True)
class FloatTiles:
    """[rows / 16 rounded up, features / 32, 16, 32] bf16 or f16; `features` is a multiple of 32."""

    features: int

    @property
    def row_bytes(self) -> int:
        return 2 * self.features

    @property
    def tile_row_bytes(self) -> int:
        """The bytes of sixteen rows."""
        return TILE_ROWS * self.row_bytes


@dataclass(frozen=True, slots=True)
class Int8Tiles:
    """[rows / 16 rounded up, tiles, 16, 64] i8; the last tile may be partly filled."""

    features: int

    @property
    def tiles(self) -> int:
        return -(-self.features // TILE_ROW_BYTES)

    @property
    def row_bytes(self) -> int:
        return TILE_ROW_BYTES * self.tiles

    @property
    def tile_row_bytes(self) -> int:
        """The bytes of sixteen rows."""
        return TILE_BYTES * self.tiles


@dataclass(frozen=True, slots=True)
class Int8Blocks:
    """[rows / 16 rounded up, blocks] of quants, and statistics of each row.

    A block holds quants [16, 32] i8 and, for the 16 rows, scales [16] f32, shifts [3, 16] i32 and sums [3,
    16] f32; the 3 are the full block and its halves.
    """

    features: int
    scales_at: ClassVar[int] = TILE_ROWS * BLOCK
    stat_bytes: ClassVar[int] = TILE_ROWS * 4
    shifts_at: ClassVar[int] = scales_at + stat_bytes
    sums_at: ClassVar[int] = shifts_at + 3 * stat_bytes
    block_bytes: ClassVar[int] = sums_at + 3 * stat_bytes

    @property
    def blocks(self) -> int:
        return self.features // BLOCK

    @property
    def row_bytes(self) -> int:
        return self.tile_row_bytes // TILE_ROWS

    @property
    def tile_row_bytes(self) -> int:
        """The bytes of sixteen rows."""
        return self.blocks * self.block_bytes
