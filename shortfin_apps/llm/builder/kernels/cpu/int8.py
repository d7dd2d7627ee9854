"""Geometry of int8.mlir.j2 and quantise_rows.mlir.j2: quantised rows for the int8 matmuls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shortfin_apps.llm.builder.kernels.activations import TILE_ROW_BYTES, TILE_ROWS, Int8Tiles
from shortfin_apps.llm.builder.kernels.interface import Buffer, Interface, buffer
from shortfin_apps.llm.builder.weights.layout import LANES


@dataclass(frozen=True, slots=True)
class RowQuantisation:
    """Quantisation of rows of `size` values of `dtype` to Int8Tiles and a scale per row.

    `size` must be a multiple of 16. Rows are FloatTiles if `is_tiled`, otherwise row-major. With `eps`, rows
    are RMS-normed first. `is_unsigned`: bytes are stored as q + 128. `has_wide_vectors`: AVX-512.
    `has_neon`: NEON.
    """

    size: int
    dtype: str
    eps: float | None
    is_tiled: bool = False
    is_unsigned: bool = False
    has_wide_vectors: bool = True
    has_neon: bool = False

    @property
    def tiles(self) -> Int8Tiles:
        return Int8Tiles(self.size)

    @property
    def row_bytes(self) -> int:
        return self.size * (4 if self.dtype == "f32" else 2)

    @property
    def is_normed(self) -> bool:
        return self.eps is not None

    @property
    def whole(self) -> int:
        """Values of a row in whole segments; a segment is a row's 64 bytes of a tile."""
        return self.size // TILE_ROW_BYTES * TILE_ROW_BYTES

    @property
    def rest(self) -> int:
        """Vectors of 16 values in the last, partial segment of a row."""
        return (self.size - self.whole) // LANES

    @property
    def part_offsets(self) -> list[int]:
        """Offsets of a segment's four vectors in x: contiguous, or two in each of two tiles if `is_tiled`."""
        tile = TILE_ROWS * 2 * LANES
        return [0, LANES, tile, tile + LANES] if self.is_tiled else [part * LANES for part in range(4)]

    @property
    def measures_bf16(self) -> bool:
        """Whether the largest magnitude is found among bf16 values, a cache line at a time.

        This needs no conversion, as the bits of a bf16 are the upper half of an f32's.
        """
        return self.dtype == "bf16" and not self.is_normed and self.size % 32 == 0

    @property
    def reads(self) -> dict[str, Buffer]:
        norm = {"norm": buffer("f32", self.size)} if self.is_normed else {}
        return {"x": buffer(self.dtype, "rows", self.size), **norm}


def int8_buffers(tiles: Int8Tiles) -> dict[str, Buffer]:
    """Return the buffers of quantised rows: `row_tiles` = ceil(rows / 16) tiles, and a scale per row."""
    return {
        "tiles": buffer("i8", "row_tiles", tiles.tiles, TILE_ROWS, TILE_ROW_BYTES),
        "x_scales": buffer("f32", "rows"),
    }


@dataclass(frozen=True, slots=True)
class QuantiseRowsGeometry(RowQuantisation):
    """RowQuantisation of x [rows, size] as a dispatch (quantise_rows.mlir.j2)."""

    row_block: ClassVar[int] = 8  # rows per workgroup

    @property
    def interface(self) -> Interface:
        return Interface(("rows",), self.reads, int8_buffers(self.tiles))
