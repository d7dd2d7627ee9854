"""Geometry of quantise_rows.mlir.j2."""

from __future__ import annotations

from dataclasses import dataclass

from shortfin_apps.llm.builder.kernels.interface import Interface, by_address


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
        reads = by_address("x") if self.eps is None else by_address("x", "norm")
        return Interface(("rows",), reads, by_address("tiles", "x_scales"))
