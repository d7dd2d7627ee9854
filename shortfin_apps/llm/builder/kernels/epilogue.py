"""What the CPU matmuls make of their sums."""

from __future__ import annotations

from typing import Literal

# "store" leaves them, "residual" adds to them; the others make one of gate and up (`Activation` in
# model/spec.py), of which only kernels of routed experts have "clamped".
Epilogue = Literal["store", "residual", "silu", "gelu", "clamped"]

CLAMPED_SLOPE, CLAMPED_LIMIT = 1.702, 7.0


def is_gated(epilogue: Epilogue) -> bool:
    return epilogue in ("silu", "gelu", "clamped")
