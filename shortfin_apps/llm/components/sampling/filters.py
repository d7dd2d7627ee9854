"""Filters: the second step of sampling, which keeps the likeliest tokens.

They apply in the order temperature, top_k, top_p, min_p. Of a whole row only as many logits are sorted as
the filters can keep.
"""

from __future__ import annotations

import numpy as np

from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.sampling.candidates import Candidates, Floats, Ints, leading

FIRST_SORTED = 64  # how many logits of a row without candidates are sorted at first


def kept(row: Candidates, best: float, params: SamplingParams) -> tuple[Ints | None, Floats]:
    """The tokens that pass, best first, and their weights; None for all of the vocabulary, in its order.

    `best` is `row.best`. Weights are unnormalised probabilities, 1 for the best token; tokens past the last
    weight do not pass. Without `logits`, the candidates are taken for the whole row.
    """
    if row.logits is None:
        return row.token_ids, _filtered(_weights(row.values, best, params), None, params)
    weights = _weights(row.logits, best, params)
    if not (params.top_k or params.top_p < 1 or params.min_p > 0):
        return None, weights
    token_ids = row.token_ids if len(row.token_ids) else leading(weights, FIRST_SORTED)
    while not _suffice(weights[token_ids], weights, params):
        token_ids = leading(weights, 8 * len(token_ids))
    return token_ids, _filtered(weights[token_ids], weights, params)


def _weights(logits: Floats, best: float, params: SamplingParams) -> Floats:
    with np.errstate(over="ignore"):  # to minus infinity, whose weight is 0, as it is in the limit
        weights: Floats = np.exp((logits - best) / np.float32(params.temperature))
    return weights


def _suffice(sorted_weights: Floats, weights: Floats, params: SamplingParams) -> bool:
    """Whether everything that the filters keep is among the `sorted_weights`, the row's largest."""
    if len(sorted_weights) == len(weights):
        return True
    if params.top_k and len(sorted_weights) >= params.top_k:
        return True
    if params.top_p < 1 and not params.top_k and sorted_weights.sum() >= params.top_p * weights.sum():
        return True
    return params.min_p > 0 and params.top_p == 1 and bool(sorted_weights[-1] < params.min_p)


def _filtered(sorted_weights: Floats, weights: Floats | None, params: SamplingParams) -> Floats:
    """The `sorted_weights` that pass; `weights` are the whole row's, or None if not known."""
    passing = sorted_weights[: params.top_k] if params.top_k else sorted_weights
    if params.top_p < 1:
        mass = passing.sum() if params.top_k or weights is None else weights.sum()
        before = np.cumsum(passing) - passing
        # The best one passes even where the product is too small for its type.
        passing = passing[: max(1, np.count_nonzero(before < params.top_p * mass))]
    if params.min_p > 0:
        passing = passing[: max(1, np.count_nonzero(passing >= params.min_p))]
    return passing
