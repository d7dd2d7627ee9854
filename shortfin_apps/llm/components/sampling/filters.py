"""Filters: the second step of sampling, which keeps the likeliest tokens.

They apply in the order temperature, top_k, top_p, min_p. Of a whole row only as many logits are sorted as
the filters can keep.
"""

from __future__ import annotations

import numpy as np

from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.sampling.candidates import Candidates, Ints, leading
from shortfin_apps.llm.components.sampling.weights import (
    least_weight,
    mass_within,
    scale_of,
    share_of,
    weights_of,
)

FIRST_SORTED = 64  # how many logits of a row without candidates are sorted at first


def kept(row: Candidates, best: float, params: SamplingParams) -> tuple[Ints | None, Ints]:
    """The tokens that pass, best first, and their weights; None for all of the vocabulary, in its order.

    `best` is `row.best`; tokens past the last weight do not pass. Without `logits`, the candidates are taken
    for the whole row.
    """
    scale = scale_of(params.temperature)
    if row.logits is None:
        return row.token_ids, _filtered(weights_of(row.values, best, scale), None, params)
    weights = weights_of(row.logits, best, scale)
    if not (params.top_k or params.top_p < 1 or params.min_p > 0):
        return None, weights
    token_ids = row.token_ids if len(row.token_ids) else leading(row.logits, FIRST_SORTED)
    while not _suffice(weights[token_ids], weights, params):
        token_ids = leading(row.logits, 8 * len(token_ids))
    return token_ids, _filtered(weights[token_ids], weights, params)


def _suffice(sorted_weights: Ints, weights: Ints, params: SamplingParams) -> bool:
    """Whether everything that the filters keep is among the `sorted_weights`, the row's largest."""
    if len(sorted_weights) == len(weights):
        return True
    if params.top_k and len(sorted_weights) >= params.top_k:
        return True
    if params.top_p < 1 and not params.top_k:
        passing = mass_within(share_of(params.top_p), int(weights.sum()))
        if int(sorted_weights.sum()) >= passing:
            return True
    return params.min_p > 0 and params.top_p == 1 and int(sorted_weights[-1]) < least_weight(params.min_p)


def _filtered(sorted_weights: Ints, weights: Ints | None, params: SamplingParams) -> Ints:
    """The `sorted_weights` that pass; `weights` are the whole row's, or None if not known."""
    passing = sorted_weights[: params.top_k] if params.top_k else sorted_weights
    if params.top_p < 1:
        mass = passing.sum() if params.top_k or weights is None else weights.sum()
        before = np.cumsum(passing) - passing
        # The best one passes even where its share of the mass is rounded to 0.
        share = mass_within(share_of(params.top_p), int(mass))
        passing = passing[: max(1, np.count_nonzero(before < share))]
    if params.min_p > 0:
        passing = passing[: max(1, np.count_nonzero(passing >= least_weight(params.min_p)))]
    return passing
