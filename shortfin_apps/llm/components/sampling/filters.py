"""Filters: the second step of sampling, which keeps the likeliest tokens.

They apply in the order temperature, top_k, top_p, min_p, typical_p. Without top_k, a full row is filtered
while its token is drawn (`whole_row.py`).
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
    """Returns the passing tokens, best first, and their weights; tokens past the last weight do not pass.

    `best` is `row.best`. Without `logits`, the candidates are treated as the full row.
    """
    values, token_ids = _best_of(row, params.top_k)
    return token_ids, _filtered(weights_of(values, best, scale_of(params.temperature)), params)


def _best_of(row: Candidates, top_k: int) -> tuple[Floats, Ints]:
    """Returns the `top_k` best logits and their tokens, best first; without `top_k`, the candidates."""
    if row.logits is not None and len(row.token_ids) < top_k:
        token_ids = leading(row.logits, top_k)
        return row.logits[token_ids], token_ids
    num_kept = top_k or len(row.token_ids)
    return row.values[:num_kept], row.token_ids[:num_kept]


def _filtered(weights: Ints, params: SamplingParams) -> Ints:
    """Returns the leading `weights` that pass top-p and min-p; the first one always passes.

    Weights that do not pass typical_p are set to 0.
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
    """Returns the weights, in any order, with all but the most typical tokens of this mass set to 0.

    A token is more typical the nearer its information is to the entropy (arXiv:2202.00666). As in
    transformers, tokens at the same distance as the last passing one pass, too.
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
