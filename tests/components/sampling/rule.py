"""The rule for whole rows in plain integers of any size, token by token."""

from __future__ import annotations

from collections.abc import Sequence

from shortfin_apps.llm.components.sampling.draw import random_word
from shortfin_apps.llm.contract.sampling_rule import SHARE_BITS


def drawn_by_the_rule(weights: Sequence[int], share: int, least_weight: int, seed: int, index: int) -> int:
    """The token drawn from a row with these `weights`, by top-p's `share` and min-p's `least_weight`."""
    within = max(1, sum(weights) * share >> SHARE_BITS)
    pivot = max(1, least_weight) - 1
    attempt = 0
    while True:
        eligible = [(token_id, weight) for token_id, weight in enumerate(weights) if weight > pivot]
        target = random_word(seed, index, attempt) * sum(weight for _, weight in eligible) >> 64
        token_id = _which(eligible, target)
        pivot, attempt = weights[token_id], attempt + 1
        if sum(weight for weight in weights if weight > pivot) < within:
            return token_id


def _which(eligible: Sequence[tuple[int, int]], target: int) -> int:
    """The token whose weight holds the target, where weights are laid end to end."""
    for token_id, weight in eligible:
        if target < weight:
            return token_id
        target -= weight
    raise AssertionError("the target is past all weights")
