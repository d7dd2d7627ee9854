"""Layouts of activations of which matmuls read sixteen token rows at a time.

The layouts are AMX tiles of bf16 or f16, tiles of int8, and blocks of int8.
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
    """Activations in AMX tiles of bf16 or f16: [ceil(rows / 16), features / 32, 16, 32].

    `features` must be a multiple of 32.
    """

    features: int

    @property
    def row_bytes(self) -> int:
        return 2 * self.features

    @property
    def tile_row_bytes(self) -> int:
        """Bytes of sixteen rows."""
        return TILE_ROWS * self.row_bytes


@dataclass(frozen=True, slots=True)
class Int8Tiles:
    """Activations in tiles of int8: [ceil(rows / 16), tiles, 16, 64].

    The last tile along the features may be partly filled.
    """

    features: int

    @property
    def tiles(self) -> int:
        return -(-self.features // TILE_ROW_BYTES)

    @property
    def row_bytes(self) -> int:
        return TILE_ROW_BYTES * self.tiles

    @property
    def tile_row_bytes(self) -> int:
        """Bytes of sixteen rows."""
        return TILE_BYTES * self.tiles


@dataclass(frozen=True, slots=True)
class Int8Blocks:
    """Activations in quantised blocks of 32 features: [ceil(rows / 16), features / 32] blocks.

    A block, of 16 rows, has quants [16, 32] i8, scales [16] f32, shifts [3, 16] i32 and sums [3, 16] f32
    (quantise_blocks_function.mlir.j2). The dimension of 3 is: the full block, its first half, its second
    half.
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
        """Bytes of sixteen rows."""
        return self.blocks * self.block_bytes
