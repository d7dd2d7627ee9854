"""Geometry of matmul_int8.mlir.j2."""

from __future__ import annotations

from dataclasses import dataclass

from shortfin_apps.llm.builder.kernels.cpu.int8_rows import Int8Rows
from shortfin_apps.llm.builder.kernels.cpu.matmul import Epilogue
from shortfin_apps.llm.builder.kernels.cpu.matmul_grid import MatmulGrid
from shortfin_apps.llm.builder.kernels.interface import Buffer, Interface, buffer
from shortfin_apps.llm.builder.weights.layout import LANES, PANEL, TILE, num_panels

FEW_ROWS = 8  # so many each workgroup quantises by itself, which costs less than a dispatch

_BLOCK_BYTES = 768 << 10  # rows of a workgroup, which stay in the second-level cache beside its weights
_MOST_ROWS = 256
_COLUMN_GROUPS = 8  # workgroups along N, about
_TILE_ROWS = 8  # two sums a row, in 32 registers


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulInt8Geometry:
    """x [rows, k_size] times w [n, k_size]^T in bytes.

    `source` is what x comes as: "tiles" of bytes, or up to FEW_ROWS rows of f32 or bf16 that a workgroup
    quantises itself, RMS-normed first with `eps` unless that is None.
    """

    n: int
    k_size: int
    epilogue: Epilogue
    source: str
    eps: float | None
    has_bf16: bool

    @property
    def most_rows(self) -> int:
        """Rows that a workgroup quantises itself."""
        return FEW_ROWS

    @property
    def x(self) -> Int8Rows:
        return Int8Rows(self.k_size)

    @property
    def panel_bytes(self) -> int:
        """From one panel of w to the next; a panel's tiles come in pairs, one for each half."""
        return 2 * self.x.sixteen_bytes

    @property
    def grid(self) -> MatmulGrid:
        panels = num_panels(self.n)
        row_block = _BLOCK_BYTES // (TILE * self.x.tiles) // PANEL * PANEL
        row_block = max(PANEL, min(_MOST_ROWS, row_block))
        return MatmulGrid(panels, max(1, panels // _COLUMN_GROUPS), row_block, _TILE_ROWS)

    @property
    def interface(self) -> Interface:
        panels = self.grid.panels
        reads = self._source()
        reads["w"] = buffer("i8", panels, self.x.tiles, 2, LANES, TILE)
        reads["w_scales"] = buffer("f32", panels, PANEL)
        out = buffer("f32", "rows", panels * PANEL)
        if self.epilogue == "residual":
            reads["residual"] = out
        if self.epilogue == "silu":
            out = buffer("bf16", "rows", self.n // 2)
        return Interface(("rows",), reads, {"out": out})

    def _source(self) -> dict[str, Buffer]:
        if self.source == "tiles":
            return self.x.buffers
        norm = {} if self.eps is None else {"norm": buffer("f32", self.k_size)}
        return {"x": buffer(self.source, "rows", self.k_size), **norm}
