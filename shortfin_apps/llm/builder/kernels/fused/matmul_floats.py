"""Geometry of matmul_floats_function.mlir.j2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from shortfin_apps.llm.builder.kernels.cpu.matmul_grid import tail_sizes
from shortfin_apps.llm.builder.kernels.fused.matmul import MatmulGeometry
from shortfin_apps.llm.builder.kernels.interface import Regions
from shortfin_apps.llm.builder.weights.layout import PANEL
from shortfin_apps.llm.model.spec import FloatType

_ELEMENT_BYTES: dict[FloatType, int] = {"f32": 4, "f16": 2, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class MatmulFloatsGeometry(MatmulGeometry):
    """A matmul on vectors: x [rows, k_size] `x_dtype` times w [n, k_size]^T `dtype`.

    The result is f32 or, if gated, `gated_dtype`. `pair`: neighbours along K that one instruction multiplies
    and adds: 2 with dot products of bf16 pairs, for which x must be bf16 too; otherwise 1. `has_bf16`: an
    AVX-512 instruction rounds f32 to bf16. `has_wide_vectors`: AVX-512. `has_neon`: NEON.
    """

    dtype: FloatType
    x_dtype: FloatType
    gated_dtype: FloatType
    pair: Literal[1, 2]
    has_bf16: bool
    has_wide_vectors: bool
    has_neon: bool
    local: ClassVar[Regions] = Regions({})

    @property
    def x_bytes(self) -> int:
        """Bytes per element of x."""
        return _ELEMENT_BYTES[self.x_dtype]

    @property
    def steps(self) -> int:
        """Steps along K, of `pair` elements each."""
        return self.k_size // self.pair

    @property
    def x_step_bytes(self) -> int:
        return self.pair * self.x_bytes

    @property
    def step_bytes(self) -> int:
        """Bytes of a step's weights in both halves of a panel."""
        return PANEL * self.pair * _ELEMENT_BYTES[self.dtype]

    @property
    def x_row_bytes(self) -> int:
        return self.k_size * self.x_bytes

    @property
    def cached_row_bytes(self) -> int:
        return self.x_row_bytes

    @property
    def panel_bytes(self) -> int:
        return self.steps * self.step_bytes

    @property
    def out_row_bytes(self) -> int:
        return self.out_features * (_ELEMENT_BYTES[self.gated_dtype] if self.is_gated else 4)

    @property
    def has_rough_gate(self) -> bool:
        """Whether gates use the approximations of avx512/math.mlir.j2, with errors below bf16's rounding."""
        return self.is_gated and self.has_wide_vectors and self.gated_dtype == "bf16"

    @property
    def tile_rows(self) -> int:
        """Rows per tile.

        AVX-512: two vectors of sums per row, in 32 registers. Otherwise a tile covers one half of a panel:
        two vectors of sums of half the width per row, in 16 registers.
        """
        return 12 if self.has_wide_vectors else 6

    @property
    def joint_rows(self) -> int:
        """Maximum rows of a tile that computes both halves of a panel together."""
        return 12 if self.has_wide_vectors else 2

    @property
    def tail_sizes(self) -> tuple[int, ...]:
        """Rows of each of the smaller tiles for the remaining rows: descending powers of two."""
        return tail_sizes(self.tile_rows)
