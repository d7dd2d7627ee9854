"""Sampling from a full row of logits, without `top_k`: filters and draw combined, by `sampling_rule.py`.

Without HOST_FILTERS nothing is sorted, because a device that searches parts of a row in parallel could not
sort it.
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
)

PART = 1 << 14  # logits per weight computation: its temporaries fit a core's cache
FEW = 1 / 16  # of all tokens: if fewer are not banned, only their weights are computed


def draw_from_row(logits: Floats, best: float, params: SamplingParams, seed: int, index: int) -> int:
    """Draws output token `index` of a request with that seed from `logits` [V].

    `best` is the greatest logit and finite.
    """
    scale = scale_of(params.temperature)
    if (some := _few_left(logits)) is not None:
        logits = logits[some]
        return int(some[_drawn(logits, weights_of(logits, best, scale), params, seed, index)])
    if params.min_p == 0 and not has_host_filters(params):
        token_id = draw_quickly(logits, best, scale, params.top_p, seed, index)
        if token_id is not None:
            return token_id
    return _drawn(logits, _weights_of_row(logits, best, scale), params, seed, index)


def _few_left(logits: Floats) -> Ints | None:
    """Returns the tokens that are not banned, or None if there are too many to draw from them separately."""
    is_left = logits > -np.inf
    return np.flatnonzero(is_left) if np.count_nonzero(is_left) < FEW * len(logits) else None


def _drawn(logits: Floats, weights: Ints, params: SamplingParams, seed: int, index: int) -> int:
    """Draws a position in `weights`, not all 0. Removing zero weights does not change the token."""
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
    """Zeroes weights below `least`, and weights with a heavier mass of at least `within`."""
    heaviest = np.sort(weights)[::-1]
    heavier = np.cumsum(heaviest) - heaviest
    lightest = int(heaviest[np.count_nonzero(heavier < within) - 1])
    return np.where(weights >= max(lightest, least), weights, 0)


def _weights_of_row(logits: Floats, best: float, scale: np.float32) -> Ints:
    weights = np.empty(len(logits), np.int64)
    for start in range(0, len(logits), PART):
        part = slice(start, start + PART)
        weights[part] = weights_of(logits[part], best, scale)
    return weights
