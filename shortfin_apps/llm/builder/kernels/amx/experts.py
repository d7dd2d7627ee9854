"""Geometry of routed experts on AMX: experts.mlir.j2 and sort_rows.mlir.j2."""

from __future__ import annotations

from dataclasses import dataclass

from shortfin_apps.llm.builder.kernels.amx.matmul import MatmulFloatTilesGeometry
from shortfin_apps.llm.builder.kernels.interface import Interface, buffer
from shortfin_apps.llm.builder.weights.layout import LANES, PANEL
from shortfin_apps.llm.model.spec import FloatType

_COLUMN_GROUPS = 8  # approximate number of workgroups per expert


@dataclass(frozen=True, slots=True, kw_only=True)
class SortRowsGeometry:
    """Copies of the rows of x [tokens, size] `dtype`, sorted by expert.

    `count`: experts. `sharing`: experts per token, each of which gets a copy of the token's row.
    """

    count: int
    sharing: int
    size: int
    dtype: FloatType = "bf16"

    @property
    def row_block(self) -> int:
        """Rows per workgroup."""
        return 16

    @property
    def lanes(self) -> int:
        return PANEL

    @property
    def interface(self) -> Interface:
        return Interface(
            constants=("rows", "x_rows"),
            reads={
                "x": buffer(self.dtype, "x_rows", self.size),
                "order": buffer("i32", "rows"),
                "ends": buffer("i32", self.count),
            },
            writes={"sorted": buffer(self.dtype, "rows", self.size)},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMatmulGeometry:
    """A `matmul` per expert, of the expert's rows, which are contiguous; `count`: experts."""

    matmul: MatmulFloatTilesGeometry
    count: int

    @property
    def panels_per_group(self) -> int:
        """Panels per workgroup: an even number, as the results of two gated panels fill a cache line."""
        return max(2, self.matmul.panels // _COLUMN_GROUPS // 2 * 2)

    @property
    def column_groups(self) -> int:
        return -(-self.matmul.panels // self.panels_per_group)

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert's weights."""
        return self.matmul.panels * self.matmul.panel_bytes

    @property
    def bias_bytes(self) -> int:
        """Bytes of an expert's bias."""
        return 4 * self.matmul.n

    @property
    def interface(self) -> Interface:
        g = self.matmul
        return Interface(
            constants=("rows",),
            reads={
                "x": buffer(g.dtype, "rows", g.k_size),
                "w": buffer(g.dtype, g.panels * self.count, g.k_size // PANEL, 2, LANES, PANEL),
                **({"bias": buffer("f32", self.count, g.n)} if g.has_bias else {}),
                "ends": buffer("i32", self.count),
            },
            writes={"out": buffer(g.dtype if g.is_gated else "f32", "rows", g.out_features)},
        )
