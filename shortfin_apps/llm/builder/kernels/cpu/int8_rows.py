"""How rows of bytes lie in memory; see int8.mlir.j2."""

from __future__ import annotations

from dataclasses import dataclass

from shortfin_apps.llm.builder.kernels.interface import Buffer, buffer
from shortfin_apps.llm.builder.weights.layout import LANES, TILE, num_tiles


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Rows of `size` values as bytes, in tiles [rows / 16, size / 64, 16, 64] whose last is filled in part.

    A row's 64 bytes of a tile are a segment: four vectors of 16 values. `size` is a multiple of 16.
    """

    size: int

    @property
    def tiles(self) -> int:
        return num_tiles(self.size)

    @property
    def sixteen_bytes(self) -> int:
        """From one block of 16 rows to the next."""
        return self.tiles * LANES * TILE

    @property
    def whole(self) -> int:
        """Values in whole segments."""
        return self.size // TILE * TILE

    @property
    def rest(self) -> int:
        """Vectors in the segment after those."""
        return (self.size - self.whole) // LANES

    @property
    def buffers(self) -> dict[str, Buffer]:
        """The tiles of all rows, `row_tiles` = ceil(rows / 16), and the rows' scales."""
        return {
            "tiles": buffer("i8", "row_tiles", self.tiles, LANES, TILE),
            "x_scales": buffer("f32", "rows"),
        }
