"""Geometry of rms_norm.mlir.j2."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shortfin_apps.llm.builder.kernels.interface import Interface, buffer
from shortfin_apps.llm.builder.weights.layout import LANES


@dataclass(frozen=True, slots=True)
class RmsNormGeometry:
    """RMS norm of x [rows, size] f32 to y [rows, size] `dtype`.

    `has_bf16`: the CPU has an instruction that rounds f32 to bf16.
    """

    size: int
    eps: float
    dtype: str
    has_bf16: bool

    @property
    def row_block(self) -> int:
        """Rows per workgroup."""
        return 4

    @property
    def lanes(self) -> int:
        return math.gcd(self.size, LANES)

    @property
    def accumulators(self) -> int:
        """Independent partial sums of squares."""
        return 4 if self.size % (4 * self.lanes) == 0 else 1

    @property
    def step(self) -> int:
        """Values per iteration, over all accumulators."""
        return self.accumulators * self.lanes

    @property
    def interface(self) -> Interface:
        return Interface(
            constants=("rows",),
            reads={"x": buffer("f32", "rows", self.size), "weight": buffer("f32", self.size)},
            writes={"y": buffer(self.dtype, "rows", self.size)},
        )
