"""Sampling from a full row of logits, without `top_k`: filters and draw combined, by `sampling_rule.py`.

Without HOST_FILTERS nothing is sorted, so that a device can give the same tokens: devices search parts of a
row in parallel.
"""

from __future__ import annotations

from itertools import count

import numpy as np

from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.sampling.candidates import Floats, Ints
from shortfin_apps.llm.components.sampling.draw import draw
from shortfin_apps.llm.components.sampling.filters import has_host_filters, host_filtered
from shortfin_apps.llm.components.sampling.quick_draw import draw_quickly
from shortfin_apps.llm.components.sampling.weights import (
    least_weight,
    mass_within,
    scale_of,
    share_of,
    weights_of,
    weights_of_row,
)

FEW = 1 / 16  # if a smaller share of the tokens is not banned, only the weights of these are computed


def draw_from_row(logits: Floats, best: float, params: SamplingParams, seed: int, index: int) -> int:
    """Draw a request's output token `index` from `logits` [V]; return its ID.

    Callers must pass the greatest logit as `best`; it must be finite.
    """
    scale = scale_of(params.temperature)
    if (some := _few_left(logits)) is not None:
        logits = logits[some]
        return int(some[_drawn(logits, weights_of(logits, best, scale), params, seed, index)])
    if params.min_p == 0 and not has_host_filters(params):
        token_id = draw_quickly(logits, best, scale, params.top_p, seed, index)
        if token_id is not None:
            return token_id
    return _drawn(logits, weights_of_row(logits, best, scale), params, seed, index)


def _few_left(logits: Floats) -> Ints | None:
    """Return the tokens that are not banned, or None if these are at least FEW of all tokens."""
    is_left = logits > -np.inf
    return np.flatnonzero(is_left) if np.count_nonzero(is_left) < FEW * len(logits) else None


def _drawn(logits: Floats, weights: Ints, params: SamplingParams, seed: int, index: int) -> int:
    """Draw an index of `weights`, some of which must not be 0. Zero weights do not affect the token drawn."""
    within = max(1, mass_within(share_of(params.top_p), int(weights.sum())))
    if has_host_filters(params):
        likely = _likeliest(weights, within, least_weight(params.min_p))
        return draw(host_filtered(logits, likely, params), seed, index)
    pivot = max(least_weight(params.min_p), 1) - 1
    for attempt in count():
        place = draw(np.where(weights > pivot, weights, 0) if pivot else weights, seed, index, attempt)
        pivot = int(weights[place])
        if params.top_p == 1 or int(weights[weights > pivot].sum()) < within:
            break
    return place


def _likeliest(weights: Ints, within: int, least: int) -> Ints:
    """Set weights that fail min-p or top-p to 0.

    These are weights below `least`, and weights for which all heavier weights sum to at least `within`.
    """
    heaviest = np.sort(weights)[::-1]
    heavier = np.cumsum(heaviest) - heaviest
    lightest = int(heaviest[np.count_nonzero(heavier < within) - 1])
    return np.where(weights >= max(lightest, least), weights, 0)
