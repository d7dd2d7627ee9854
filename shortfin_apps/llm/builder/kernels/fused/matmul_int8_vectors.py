"""Geometry of matmul_int8_function.mlir.j2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shortfin_apps.llm.builder.kernels.cpu.matmul_grid import tail_sizes
from shortfin_apps.llm.builder.kernels.fused.matmul import MatmulBytesGeometry
from shortfin_apps.llm.builder.kernels.interface import Regions
from shortfin_apps.llm.builder.weights.layout import DOT_BYTES, MATRIX_BYTES


@dataclass(frozen=True, kw_only=True)
class MatmulInt8VectorsGeometry(MatmulBytesGeometry):
    """int8 with a scale per row and per column, on vectors.

    `has_bf16`: an instruction rounds to bf16. `pair`: neighbours along K stored together in w.
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
        """Whether w is packed for NEON's matrix products."""
        return self.pair == MATRIX_BYTES

    @property
    def is_shifted(self) -> bool:
        """Whether x's bytes are stored with an offset of 128."""
        return self.has_dot and not self.has_neon

    @property
    def tile_rows(self) -> int:
        """Rows per tile: two sums each, in 32 registers or in fewer bytes."""
        return 8 if self.has_wide_vectors else 2

    @property
    def tail_sizes(self) -> tuple[int, ...]:
        """Row counts of the smaller tiles for the remainder: the binary digits of its row count."""
        return tail_sizes(self.tile_rows)
