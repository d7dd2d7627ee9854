"""Layouts of activations of which matmuls read sixteen token rows at a time.

The layouts are AMX tiles of bf16 or f16, tiles of int8, and blocks of integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shortfin_apps.llm.model.spec import QuantBits
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
class QuantBlocks:
    """Activations in quantised blocks of 32 features: [ceil(rows / 16), features / 32] blocks.

    A quant has 8 or 12 `bits`, and a digit for each of its bytes: 12 bits are 16 * first + second. A block,
    of 16 rows, has quants [16, digits, 32] i8, scales [16] f32, shifts [3, 16] i32 and sums [3, 16] f32
    (quantise_blocks_function.mlir.j2). The dimension of 3 is: the full block, its first half, its second
    half.
    """

    features: int
    bits: QuantBits
    stat_bytes: ClassVar[int] = TILE_ROWS * 4

    @property
    def digits(self) -> int:
        return 1 if self.bits == 8 else 2

    @property
    def most(self) -> int:
        """The largest quant, of which all digits are in [-127, 127]."""
        return 127 if self.bits == 8 else 16 * 127 + 7

    @property
    def shift(self) -> int:
        """The factor of a row's sum of quants in its shift, before the last digit is added."""
        return -128 if self.bits == 8 else -128 // 16

    @property
    def quant_row_bytes(self) -> int:
        return self.digits * BLOCK

    @property
    def scales_at(self) -> int:
        return TILE_ROWS * self.quant_row_bytes

    @property
    def shifts_at(self) -> int:
        return self.scales_at + self.stat_bytes

    @property
    def sums_at(self) -> int:
        return self.shifts_at + 3 * self.stat_bytes

    @property
    def block_bytes(self) -> int:
        return self.sums_at + 3 * self.stat_bytes

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
