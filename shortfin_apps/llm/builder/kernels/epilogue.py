"""The epilogues of matmuls: what happens to the sums before they are written."""

from __future__ import annotations

from typing import Literal

# "store" writes the sums, "residual" adds the residual to them. The others combine gate and up by an
# activation (`Activation` in model/operations.py); only kernels of routed experts support "clamped".
Epilogue = Literal["store", "residual", "silu", "gelu", "clamped"]

CLAMPED_SLOPE, CLAMPED_LIMIT = 1.702, 7.0


def is_gated(epilogue: Epilogue) -> bool:
    return epilogue in ("silu", "gelu", "clamped")
