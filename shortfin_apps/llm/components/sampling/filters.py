"""Filters: the second step of sampling, which keeps the likeliest tokens.

They apply in the order temperature, top_k, top_p, min_p, typical_p. Without top_k, a whole row is filtered as
its token is drawn (`whole_row.py`).
"""

from __future__ import annotations

import numpy as np

from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.sampling.candidates import Candidates, Floats, Ints, leading
from shortfin_apps.llm.components.sampling.weights import (
    least_weight,
    mass_within,
    scale_of,
    share_of,
    weights_of,
)


def kept(row: Candidates, best: float, params: SamplingParams) -> tuple[Ints, Ints]:
    """The tokens that pass, best first, and their weights; tokens past the last weight do not pass.

    `best` is `row.best`. Without `logits`, the candidates are taken for the whole row.
    """
    values, token_ids = _best_of(row, params.top_k)
    return token_ids, _filtered(weights_of(values, best, scale_of(params.temperature)), params)


def _best_of(row: Candidates, top_k: int) -> tuple[Floats, Ints]:
    """The `top_k` best logits and their tokens, best first; without `top_k`, the candidates."""
    if row.logits is not None and len(row.token_ids) < top_k:
        token_ids = leading(row.logits, top_k)
        return row.logits[token_ids], token_ids
    num_kept = top_k or len(row.token_ids)
    return row.values[:num_kept], row.token_ids[:num_kept]


def _filtered(weights: Ints, params: SamplingParams) -> Ints:
    """The leading `weights` that pass top-p and min-p, of which the first one passes always.

    Those that do not pass typical_p are 0.
    """
    passing = weights
    if params.top_p < 1:
        before = np.cumsum(weights) - weights
        share = mass_within(share_of(params.top_p), int(weights.sum()))
        passing = passing[: max(1, np.count_nonzero(before < share))]
    if params.min_p > 0:
        passing = passing[: max(1, np.count_nonzero(passing >= least_weight(params.min_p)))]
    return passing if params.typical_p == 1 else typical(passing, params.typical_p)


def typical(weights: Ints, mass: float) -> Ints:
    """The weights, in any order, those set to 0 that are not among the most typical ones with this mass.

    Most typical is the token whose information is nearest to the entropy (arXiv:2202.00666); those as far
    from it as the last one pass, too, as in transformers.
    """
    some = weights > 0
    probs = weights[some] / weights.sum()
    information = -np.log(probs)
    distance = np.abs(information - (probs * information).sum())
    order = np.argsort(distance)
    before = np.cumsum(probs[order]) - probs[order]
    num_passing = max(1, int(np.count_nonzero(before < mass)))
    farthest = distance[order[num_passing - 1]]
    passing = np.zeros_like(weights)
    passing[some] = np.where(distance <= farthest, weights[some], 0)
    return passing
