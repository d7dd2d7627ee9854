"""Geometry of quantise_rows.mlir.j2."""

from __future__ import annotations

from dataclasses import dataclass

from shortfin_apps.llm.builder.kernels.cpu.int8_rows import Int8Rows
from shortfin_apps.llm.builder.kernels.interface import Interface, buffer


@dataclass(frozen=True, slots=True)
class QuantiseRowsGeometry:
    """x [rows, size] `dtype` to bytes and scales; RMS-normed first, with `eps`, unless that is None."""

    size: int
    dtype: str
    eps: float | None

    @property
    def row_block(self) -> int:
        """Rows of a workgroup."""
        return 8

    @property
    def interface(self) -> Interface:
        norm = {} if self.eps is None else {"norm": buffer("f32", self.size)}
        return Interface(
            constants=("rows",),
            reads={"x": buffer(self.dtype, "rows", self.size), **norm},
            writes=Int8Rows(self.size).buffers,
        )
