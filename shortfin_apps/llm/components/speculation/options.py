"""Options of speculation."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_MAX_TOKENS = 8
# Cost of a token row relative to reading the weights (acceptance.py), as measured (docs/measurements.md).
# CPU: with SmolLM2. GPU: on an H200, the extra time per row of an extend of 64 rows over a decode of one row,
# which is 1.0 % with an 8B model in bf16, 1.6 % in fp8, 2.4 % in q4, and 1.2 % with SmolLM2.
CPU_ROW_COST = 0.075
GPU_ROW_COST = 1 / 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """How many tokens prompt lookup proposes for a request at once, at most (0: none).

    `row_cost` is the cost of a token row relative to reading the weights (acceptance.py).
    """

    max_tokens: int = DEFAULT_MAX_TOKENS
    row_cost: float = CPU_ROW_COST
