"""Geometry of matmul_int8.mlir.j2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shortfin_apps.llm.builder.kernels.activations import TILE_ROWS, Int8Tiles
from shortfin_apps.llm.builder.kernels.cpu.int8 import RowQuantisation, int8_buffers
from shortfin_apps.llm.builder.kernels.cpu.matmul_grid import MatmulGrid
from shortfin_apps.llm.builder.kernels.epilogue import Epilogue, is_gated
from shortfin_apps.llm.builder.kernels.interface import Interface, buffer
from shortfin_apps.llm.builder.weights.layout import LANES, PANEL, TILE, num_panels

FEW_ROWS = 8  # up to this many rows, each workgroup quantises x itself, which costs less than a dispatch

_BLOCK_BYTES = 768 << 10  # bytes of x per workgroup: its rows share the L2 cache with the weights
_MOST_ROWS = 256
_COLUMN_GROUPS = 8  # approximate number of workgroups along N


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulInt8Geometry:
    """An int8 matmul: x [rows, k_size] times w [n, k_size]^T.

    `source`: "tiles" if x is Int8Tiles; "f32" or "bf16" for up to FEW_ROWS rows that each workgroup
    quantises itself. With `eps`, these rows are RMS-normed first. `has_bf16`: an instruction rounds f32 to
    bf16. integers.mlir.j2 defines the other `has_` fields.
    """

    n: int
    k_size: int
    epilogue: Epilogue
    source: str
    eps: float | None
    has_bf16: bool
    has_wide_vectors: bool = True
    has_dot: bool = True
    has_neon: bool = False
    has_signs: ClassVar[bool] = True  # both x and w
    has_smmla: ClassVar[bool] = False  # only the fused layer uses SMMLA

    @property
    def is_shifted(self) -> bool:
        """Whether x's bytes are stored with an offset of 128."""
        return self.has_dot and not self.has_neon

    @property
    def quantisation(self) -> RowQuantisation | None:
        """The quantisation of x by each workgroup; None if x is Int8Tiles."""
        if self.source == "tiles":
            return None
        return RowQuantisation(
            size=self.k_size,
            dtype=self.source,
            eps=self.eps,
            is_unsigned=self.is_shifted,
            has_wide_vectors=self.has_wide_vectors,
            has_neon=self.has_neon,
        )

    @property
    def local_tiles_bytes(self) -> int:
        """Bytes of the rows that a workgroup quantises itself."""
        return -(-FEW_ROWS // TILE_ROWS) * self.x.tile_row_bytes

    @property
    def local_scales_bytes(self) -> int:
        return FEW_ROWS * 4

    @property
    def x(self) -> Int8Tiles:
        return Int8Tiles(self.k_size)

    @property
    def panel_bytes(self) -> int:
        """Bytes of a panel of w, which has a tile per half of the panel for every 64 bytes of K."""
        return 2 * self.x.tile_row_bytes

    @property
    def grid(self) -> MatmulGrid:
        panels = num_panels(self.n)
        row_block = _BLOCK_BYTES // self.x.row_bytes // PANEL * PANEL
        row_block = max(PANEL, min(_MOST_ROWS, row_block))
        tile_rows = 8 if self.has_wide_vectors else 2  # two sums per row; AVX-512 has 32 registers
        return MatmulGrid(panels, max(1, panels // _COLUMN_GROUPS), row_block, tile_rows)

    @property
    def interface(self) -> Interface:
        panels = self.grid.panels
        out = buffer("f32", "rows", panels * PANEL)
        reads = {
            **(self.quantisation.reads if self.quantisation else int8_buffers(self.x)),
            "w": buffer("i8", panels, self.x.tiles, 2, LANES, TILE),
            "w_scales": buffer("f32", panels, PANEL),
            **({"residual": out} if self.epilogue == "residual" else {}),
        }
        if is_gated(self.epilogue):
            out = buffer("bf16", "rows", self.n // 2)
        return Interface(("rows",), reads, {"out": out})
