"""Filters: the second step of sampling, which keeps the likeliest tokens.

They apply in the order temperature, top_k, top_p, min_p, HOST_FILTERS. Without top_k, a full row is filtered
while its token is drawn (`whole_row.py`). Devices do not implement HOST_FILTERS: with one of these, the token
is drawn on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from shortfin_apps.llm.components.request.sampling_params import PARAMS, SamplingParams
from shortfin_apps.llm.components.sampling.candidates import Candidates, Floats, Ints, leading
from shortfin_apps.llm.components.sampling.weights import (
    least_weight,
    mass_within,
    scale_of,
    share_of,
    weights_of,
)


def kept(row: Candidates, best: float, params: SamplingParams) -> tuple[Ints, Ints]:
    """Return token IDs, best first, and weights for the first of these; a token without a weight is dropped.

    A weight of 0 also means that the token is dropped. `best` is `row.best`. If the row has no `logits`, its
    candidates are treated as the full row.
    """
    values, token_ids = _best_of(row, params.top_k)
    return token_ids, _filtered(values, weights_of(values, best, scale_of(params.temperature)), params)


def _best_of(row: Candidates, top_k: int) -> tuple[Floats, Ints]:
    """Return the `top_k` best logits and their tokens, best first; all candidates if `top_k` is 0."""
    if row.logits is not None and len(row.token_ids) < top_k:
        token_ids = leading(row.logits, top_k)
        return row.logits[token_ids], token_ids
    num_kept = top_k or len(row.token_ids)
    return row.values[:num_kept], row.token_ids[:num_kept]


def _filtered(values: Floats, weights: Ints, params: SamplingParams) -> Ints:
    """Return the leading `weights` that pass top-p and min-p; the first always passes.

    Weights that do not pass HOST_FILTERS are set to 0. `values` are the logits of `weights`, best first.
    """
    passing = weights
    if params.top_p < 1:
        before = np.cumsum(weights) - weights
        share = mass_within(share_of(params.top_p), int(weights.sum()))
        passing = passing[: max(1, np.count_nonzero(before < share))]
    if params.min_p > 0:
        passing = passing[: max(1, np.count_nonzero(passing >= least_weight(params.min_p)))]
    return host_filtered(values[: len(passing)], passing, params)


def has_host_filters(params: SamplingParams) -> bool:
    """Return whether any of the HOST_FILTERS is on."""
    return any(getattr(params, name) != off for name, off in _OFF.items())


def host_filtered(values: Floats, weights: Ints, params: SamplingParams) -> Ints:
    """Set weights that do not pass HOST_FILTERS to 0. `values` and `weights` may be in any order."""
    for name, passing in HOST_FILTERS.items():
        if (value := getattr(params, name)) != _OFF[name]:
            weights = passing(values, weights, value)
    return weights


def typical(values: Floats, weights: Ints, mass: float) -> Ints:
    """Keep the most typical tokens that together reach the probability `mass`; set other weights to 0.

    A token is more typical the nearer its information is to the entropy (arXiv:2202.00666). As in
    transformers, tokens at the same distance as the least typical token kept are kept, too.
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


# By the name of the parameter, in order of application: a function of logits, weights (0: already dropped)
# and the parameter's value. It returns the weights, with more of them set to 0.
HOST_FILTERS: Mapping[str, Callable[[Floats, Ints, float], Ints]] = {"typical_p": typical}
_OFF = {name: PARAMS[name].default for name in HOST_FILTERS}
