"""Geometry of the row-wise functions of the fused layer: norms and quantisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shortfin_apps.llm.builder.kernels.activations import TILE_BYTES, Bf16Tiles, Int8Blocks
from shortfin_apps.llm.builder.kernels.cpu.int8 import RowQuantisation

ROW_BLOCK = 4  # rows of a work item, where rows are few


@dataclass(frozen=True, slots=True)
class RmsNormGeometry:
    """x[rows, size] f32 -> bf16 in tiles (rms_norm_function.mlir.j2). `size` is a multiple of 32."""

    size: int
    eps: float
    row_block: ClassVar[int] = ROW_BLOCK

    @property
    def x_row_bytes(self) -> int:
        return 4 * self.size

    @property
    def y(self) -> Bf16Tiles:
        return Bf16Tiles(self.size)

    @property
    def accumulators(self) -> int:
        """Vectors of 16 f32 that sum squares independently of each other."""
        return 4 if self.size % 64 == 0 else 2


@dataclass(frozen=True, slots=True)
class QuantiseBlocksGeometry:
    """x[rows, size] -> Int8Blocks (quantise_blocks_function.mlir.j2).

    `norm` is applied first, to x f32; without one x is bf16, row by row or in tiles. `size` is a multiple of
    32.
    """

    size: int
    is_tiled: bool
    norm: RmsNormGeometry | None = None
    has_wide_vectors: bool = True
    row_block: ClassVar[int] = ROW_BLOCK

    @property
    def x_row_bytes(self) -> int:
        return (4 if self.norm else 2) * self.size

    @property
    def x_block_bytes(self) -> int:
        """Bytes between a row's blocks of x."""
        if self.is_tiled:
            return TILE_BYTES
        return self.x_row_bytes // self.y.blocks

    @property
    def y(self) -> Int8Blocks:
        return Int8Blocks(self.size)


@dataclass(frozen=True, slots=True)
class QuantiseRowsGeometry:
    """x[rows, size] -> Int8Tiles and a scale for each row (quantise_rows_function.mlir.j2).

    `norm` is applied first, to x f32; without one x is bf16, row by row or in tiles.
    """

    size: int
    is_tiled: bool
    norm: RmsNormGeometry | None = None
    row_block: ClassVar[int] = ROW_BLOCK

    @property
    def dtype(self) -> str:
        return "f32" if self.norm else "bf16"

    @property
    def quantisation(self) -> RowQuantisation:
        eps = self.norm.eps if self.norm else None
        return RowQuantisation(size=self.size, dtype=self.dtype, eps=eps, is_tiled=self.is_tiled)
