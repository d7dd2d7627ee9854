"""Sampling parameters: how the tokens of a request are chosen, and when it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shortfin_apps.llm.errors import InvalidRequestError

MAX_LOGPROBS = 20  # alternatives that can be reported for a token
# The smallest normal f32, the type in which logits are divided by the temperature: a smaller one becomes 0
# there, or has a reciprocal that overflows.
SMALLEST_TEMPERATURE = 2.0**-126


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Values are checked, never clamped. Stop strings are not among them: the front end matches those.

    Any `temperature` below SMALLEST_TEMPERATURE is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off.
    `logprobs` is the number of alternatives to report for each generated token (0: the chosen token
    alone); None reports nothing.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check("max_tokens", self.max_tokens >= 1, "must be at least 1")
        _check("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "must lie in [0, max_tokens]")
        finite = math.isfinite(self.temperature)
        _check("temperature", finite and 0 <= self.temperature <= 100, "must lie in [0, 100]")
        _check("top_k", self.top_k >= 0, "must be 0 (off) or more")
        _check("top_p", 0 < self.top_p <= 1, "must lie in (0, 1]")
        _check("min_p", 0 <= self.min_p <= 1, "must lie in [0, 1]")
        _check("seed", self.seed is None or 0 <= self.seed < 2**63, "must lie in [0, 2**63)")
        few = self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS
        _check("logprobs", few, f"must lie in [0, {MAX_LOGPROBS}]")

    @property
    def greedy(self) -> bool:
        return self.temperature < SMALLEST_TEMPERATURE or self.top_k == 1


def _check(param: str, ok: bool, rule: str) -> None:
    if not ok:
        raise InvalidRequestError(f"`{param}` {rule}", param)
