"""Geometry of quantise_rows.mlir.j2."""

from __future__ import annotations

from dataclasses import dataclass

from shortfin_apps.llm.builder.kernels.cpu.int8 import RowQuantisation, int8_buffers
from shortfin_apps.llm.builder.kernels.interface import Interface


@dataclass(frozen=True, slots=True)
class QuantiseRowsGeometry:
    """x [rows, size] `dtype` to bytes and scales, RMS-normed first with `eps` unless it is None.

    RowQuantisation describes the other fields.
    """

    size: int
    dtype: str
    eps: float | None
    is_unsigned: bool = True
    has_wide_vectors: bool = True
    has_neon: bool = False

    @property
    def row_block(self) -> int:
        """Rows per workgroup."""
        return 8

    @property
    def quantisation(self) -> RowQuantisation:
        return RowQuantisation(
            size=self.size,
            dtype=self.dtype,
            eps=self.eps,
            is_unsigned=self.is_unsigned,
            has_wide_vectors=self.has_wide_vectors,
            has_neon=self.has_neon,
        )

    @property
    def interface(self) -> Interface:
        quantisation = self.quantisation
        return Interface(("rows",), quantisation.reads, int8_buffers(quantisation.tiles))
