"""Geometry of matmul_block_int8.mlir.j2."""

from __future__ import annotations

from dataclasses import dataclass

from shortfin_apps.llm.builder.kernels.amx.matmul import MatmulBlockInt8Geometry
from shortfin_apps.llm.builder.kernels.cpu.matmul_grid import MatmulGrid
from shortfin_apps.llm.builder.kernels.cpu.quantise_blocks import blocks_buffer
from shortfin_apps.llm.builder.kernels.interface import Interface, buffer
from shortfin_apps.llm.builder.weights.layout import PANEL, panel_terms

_BLOCK_BYTES = 384 << 10  # rows of a workgroup, which stay in the second-level cache beside its weights
_MOST_ROWS = 256
_COLUMN_GROUPS = 32  # workgroups along N, about


@dataclass(frozen=True, kw_only=True)
class VectorBlockInt8Geometry(MatmulBlockInt8Geometry):
    """x Int8Blocks [rows, k_size] times w [n, k_size]^T in `blocks`, as a dispatch of its own."""

    @property
    def grid(self) -> MatmulGrid:
        row_block = _BLOCK_BYTES // self.x.row_bytes // PANEL * PANEL
        row_block = max(PANEL, min(_MOST_ROWS, row_block))
        panels = max(1, self.panels // _COLUMN_GROUPS)
        # Two gated panels make a block of the result, which is quantised by one workgroup.
        # Two sums a row, and as many products, in 32 registers or in 16 of half the width.
        tile_rows = 8 if self.has_wide_vectors else 2
        return MatmulGrid(self.panels, panels + panels % 2 * self.is_gated, row_block, tile_rows)

    @property
    def interface(self) -> Interface:
        terms, terms_dtype = panel_terms(self.blocks, self.panels, self.k_size)
        quants = buffer("i8", self.panels, self.panel_bytes)
        reads = {"x": blocks_buffer(self.x), "w": quants, "w_scales": buffer(terms_dtype, *terms)}
        out = buffer("bf16" if self.is_gated else "f32", "rows", self.out_features)
        if self.epilogue == "residual":
            reads["residual"] = out
        quantised = {"quantised": blocks_buffer(self.quantise.y)} if self.is_gated else {}
        return Interface(("rows",), reads, {"out": out, **quantised})
