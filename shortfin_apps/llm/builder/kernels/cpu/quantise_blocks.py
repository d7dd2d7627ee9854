"""Geometry of quantise_blocks.mlir.j2."""

from __future__ import annotations

from dataclasses import dataclass

from shortfin_apps.llm.builder.kernels.activations import Int8Blocks
from shortfin_apps.llm.builder.kernels.amx.stages import QuantiseBlocksGeometry, RmsNormGeometry
from shortfin_apps.llm.builder.kernels.interface import Buffer, Interface, buffer


@dataclass(frozen=True, slots=True)
class QuantiseDispatchGeometry:
    """x [rows, size] to Int8Blocks: f32 that is RMS-normed first, with `eps`, or bf16 if that is None."""

    size: int
    eps: float | None
    has_wide_vectors: bool = True

    @property
    def function(self) -> QuantiseBlocksGeometry:
        norm = None if self.eps is None else RmsNormGeometry(self.size, self.eps)
        return QuantiseBlocksGeometry(
            self.size, is_tiled=False, norm=norm, has_wide_vectors=self.has_wide_vectors
        )

    @property
    def row_block(self) -> int:
        """Rows of a workgroup."""
        return self.function.row_block

    @property
    def interface(self) -> Interface:
        if self.eps is None:
            reads = {"x": buffer("bf16", "rows", self.size)}
        else:
            reads = {"x": buffer("f32", "rows", self.size), "norm": buffer("f32", self.size)}
        return Interface(("rows",), reads, {"blocks": blocks_buffer(self.function.y)})


def blocks_buffer(blocks: Int8Blocks) -> Buffer:
    """Those of all rows, `row_tiles` = ceil(rows / 16)."""
    return buffer("i8", "row_tiles", blocks.blocks, blocks.block_bytes)
