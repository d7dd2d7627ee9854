"""What the CPU matmuls make of their sums."""

from __future__ import annotations

from typing import Literal

# "store" leaves them, "residual" adds to them; "silu" and "gelu" (its approximation by tanh) multiply that of
# the gate with up.
Epilogue = Literal["store", "residual", "silu", "gelu"]


def is_gated(epilogue: Epilogue) -> bool:
    return epilogue in ("silu", "gelu")
