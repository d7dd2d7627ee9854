"""Geometry of matmul_int8_function.mlir.j2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shortfin_apps.llm.builder.kernels.cpu.matmul_grid import tail_sizes
from shortfin_apps.llm.builder.kernels.fused.matmul import MatmulBytesGeometry
from shortfin_apps.llm.builder.kernels.interface import Regions
from shortfin_apps.llm.builder.weights.chosen_layout import MATRIX_BYTES
from shortfin_apps.llm.builder.weights.layout import DOT_BYTES


@dataclass(frozen=True, kw_only=True)
class MatmulInt8VectorsGeometry(MatmulBytesGeometry):
    """An int8 matmul with a scale per row of x and per column, on vectors.

    `has_bf16`: an instruction rounds f32 to bf16. `pair`: neighbours along K that are contiguous in w.
    integers.mlir.j2 defines the other `has_` fields.
    """

    has_bf16: bool
    has_wide_vectors: bool
    has_dot: bool
    has_neon: bool
    pair: int = DOT_BYTES
    has_signs: ClassVar[bool] = True  # both x and w
    local: ClassVar[Regions] = Regions({})

    @property
    def has_smmla(self) -> bool:
        """Whether w is packed for SMMLA, NEON's matrix products."""
        return self.pair == MATRIX_BYTES

    @property
    def is_shifted(self) -> bool:
        """Whether x is stored as unsigned bytes q + 128."""
        return self.has_dot and not self.has_neon

    @property
    def tile_rows(self) -> int:
        """Rows per tile.

        A row has two sums in registers: AVX-512 has 32, other CPUs have fewer or smaller ones.
        """
        return 8 if self.has_wide_vectors else 2

    @property
    def tail_sizes(self) -> tuple[int, ...]:
        """Rows of each of the smaller tiles for the remaining rows: descending powers of two."""
        return tail_sizes(self.tile_rows)
