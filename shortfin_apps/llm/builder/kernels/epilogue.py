"""The epilogues of the CPU matmuls."""

from __future__ import annotations

from typing import Literal

# "store" keeps the sums, "residual" adds to them; the others combine gate and up (`Activation` in
# model/operations.py). Only kernels of routed experts support "clamped".
Epilogue = Literal["store", "residual", "silu", "gelu", "clamped"]

CLAMPED_SLOPE, CLAMPED_LIMIT = 1.702, 7.0


def is_gated(epilogue: Epilogue) -> bool:
    return epilogue in ("silu", "gelu", "clamped")
