"""Geometry of the row-wise functions of the fused layer: norms and quantisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shortfin_apps.llm.builder.kernels.activations import TILE_BYTES, FloatTiles, QuantBlocks
from shortfin_apps.llm.builder.kernels.cpu.int8 import RowQuantisation
from shortfin_apps.llm.model.spec import FloatType, QuantBits

ROW_BLOCK = 4  # rows per work item, if rows are few


@dataclass(frozen=True, slots=True)
class RmsNormGeometry:
    """RMS norm of x [rows, size] f32 (rms_norm_function.mlir.j2).

    `size` is a multiple of 32.
    """

    size: int
    eps: float
    makes_tiles: bool = True
    dtype: FloatType = "bf16"
    has_bf16: bool = True
    row_block: ClassVar[int] = ROW_BLOCK

    @property
    def x_row_bytes(self) -> int:
        return 4 * self.size

    @property
    def y(self) -> FloatTiles:
        return FloatTiles(self.size)

    @property
    def y_row_bytes(self) -> int:
        """Bytes of a row of the result, if row-major."""
        return self.size * (4 if self.dtype == "f32" else 2)

    @property
    def accumulators(self) -> int:
        """Vectors of 16 f32 that sum squares independently."""
        return 4 if self.size % 64 == 0 else 2


@dataclass(frozen=True, slots=True)
class QuantiseBlocksGeometry:
    """Quantisation of x [rows, size] to QuantBlocks (quantise_blocks_function.mlir.j2).

    `bits`: of the quants. With a `norm`, x is f32 and RMS-normed first. Without one, x is `dtype`, row-major
    or, if `is_tiled` (only bf16), FloatTiles. `size` must be a multiple of 32.
    """

    size: int
    bits: QuantBits
    is_tiled: bool
    norm: RmsNormGeometry | None = None
    has_wide_vectors: bool = True
    dtype: FloatType = "bf16"
    has_neon: bool = False
    row_block: ClassVar[int] = ROW_BLOCK

    @property
    def x_row_bytes(self) -> int:
        return (4 if self.norm or self.dtype == "f32" else 2) * self.size

    @property
    def x_block_bytes(self) -> int:
        """Bytes from one block of a row of x to the next."""
        if self.is_tiled:
            return TILE_BYTES
        return self.x_row_bytes // self.y.blocks

    @property
    def y(self) -> QuantBlocks:
        return QuantBlocks(self.size, self.bits)


@dataclass(frozen=True, slots=True)
class RowQuantisationStage(RowQuantisation):
    """RowQuantisation as a stage of the fused layer (quantise_rows_function.mlir.j2).

    f32 rows are RMS-normed first, bf16 rows are not.
    """

    row_block: ClassVar[int] = ROW_BLOCK
