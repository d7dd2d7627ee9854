"""Geometry of matmul.mlir.j2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shortfin_apps.llm.builder.kernels.cpu.matmul_grid import MatmulGrid
from shortfin_apps.llm.builder.kernels.epilogue import CLAMPED_LIMIT, CLAMPED_SLOPE, Epilogue, is_gated
from shortfin_apps.llm.builder.kernels.interface import Interface, buffer
from shortfin_apps.llm.builder.weights.layout import LANES, group_bytes, num_panels, panel_terms
from shortfin_apps.llm.model.weight_blocks import E2M1, BlockType

_MEMORY_PAGE_BYTES = 4096
_COLUMN_GROUPS = 32  # approximate number of workgroups along N
_ROW_BLOCK = 128
_EXPERT_COLUMN_GROUPS = 8  # for each expert


@dataclass(frozen=True, slots=True)
class ExpertGeometry:
    """The experts of a matmul; the tables of route.mlir.j2 assign rows to experts.

    `count`: experts. A row of the product belongs to a token and one of its experts. `sharing`: consecutive
    rows of the product that read the same row of x. `has_bias`: sums start from the expert's bias vector.
    """

    count: int
    sharing: int
    has_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulGeometry:
    """A matmul: x [rows, k_size] `dtype` times w [n, k_size]^T, in `dtype` or in quantised `blocks`.

    `pair`: neighbours along K that one instruction multiplies and adds: 2 with a dot product of bf16 pairs,
    otherwise 1. With `experts`, w has one matrix [n, k_size] per expert.
    """

    n: int
    k_size: int
    epilogue: Epilogue
    dtype: str
    blocks: BlockType | None
    pair: Literal[1, 2]
    has_wide_vectors: bool
    experts: ExpertGeometry | None = None

    @property
    def is_gated(self) -> bool:
        return is_gated(self.epilogue)

    @property
    def e2m1(self) -> list[int]:
        return [int(value) for value in E2M1]

    @property
    def clamped_slope(self) -> float:
        return CLAMPED_SLOPE

    @property
    def clamped_limit(self) -> float:
        return CLAMPED_LIMIT

    @property
    def lanes(self) -> int:
        """f32 lanes of an accumulator vector, and output features of half a panel."""
        return LANES

    @property
    def width(self) -> int:
        """Weights per multiply instruction."""
        return LANES * self.pair

    @property
    def steps(self) -> int:
        return self.k_size // self.pair

    @property
    def num_blocks(self) -> int:
        """Quantised blocks along K; 1 for float weights."""
        return self.k_size // self.blocks.size if self.blocks else 1

    @property
    def block_steps(self) -> int:
        """Steps along K that share the scale and minimum of a block."""
        return self.steps // self.num_blocks

    @property
    def group_blocks(self) -> int:
        """Blocks per group, which share the f16 of their scales and of their minima; 0 without groups."""
        group = self.blocks.group if self.blocks else None
        return group // self.blocks.size if self.blocks and group else 0

    @property
    def group_head_bytes(self) -> int:
        """Bytes of the f16 shared by a group in a panel; each block's own i8 follow."""
        assert self.blocks is not None
        return group_bytes(self.blocks) - self.group_blocks * self.block_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's own i8 in a panel, with groups."""
        assert self.blocks is not None
        return 2 * LANES * self.blocks.num_terms

    @property
    def prefetch_steps(self) -> int:
        """Steps per memory page of float weights, as hardware prefetchers stop at the end of a page.

        Quantised weights use the same number of steps.
        """
        return _MEMORY_PAGE_BYTES // (2 * self.width * (4 if self.dtype == "f32" else 2))

    @property
    def halves(self) -> int:
        """Halves of panels that contain columns of the result; the last panel may have only one."""
        return -(-self.n // LANES)

    @property
    def out_features(self) -> int:
        return self.n // 2 if self.is_gated else self.halves * LANES

    @property
    def grid(self) -> MatmulGrid:
        # Two accumulators per row, in 32 registers or in 16 of half the width.
        tile_rows = 8 if self.has_wide_vectors else 2
        panels = num_panels(self.n)
        column_groups = _EXPERT_COLUMN_GROUPS if self.experts else _COLUMN_GROUPS
        return MatmulGrid(panels, max(1, panels // column_groups), _ROW_BLOCK, tile_rows)

    @property
    def interface(self) -> Interface:
        panels = self.grid.panels * (self.experts.count if self.experts else 1)
        x_rows = "x_rows" if self.experts else "rows"
        reads = {"x": buffer("i32" if self.pair == 2 else self.dtype, x_rows, self.steps)}
        if self.blocks:
            reads["w"] = buffer("i8", panels, self.steps, 2 * self.width * self.blocks.bits // 8)
            shape, dtype = panel_terms(self.blocks, panels, self.k_size)
            reads["scales"] = buffer(dtype, *shape)
        else:
            reads["w"] = buffer(self.dtype, panels, self.steps, 2 * self.width)
        if self.epilogue == "residual":
            reads["residual"] = buffer("f32", "rows", self.out_features)
        if self.experts and self.experts.has_bias:
            reads["bias"] = buffer("f32", self.experts.count, self.n)
        if self.experts:
            reads["ends"] = buffer("i32", self.experts.count)
            reads["order"] = buffer("i32", "rows")
        out_dtype = self.dtype if self.is_gated else "f32"
        constants = ("rows", "x_rows") if self.experts else ("rows",)
        return Interface(constants, reads, {"out": buffer(out_dtype, "rows", self.out_features)})
