"""Filters: the second step of sampling, which keeps the likeliest tokens.

They apply in the order temperature, top_k, top_p, min_p, HOST_FILTERS. Without top_k, a full row is filtered
while its token is drawn (`whole_row.py`). Devices know no HOST_FILTERS, so such tokens are drawn on the host.
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
    """Returns the passing tokens, best first, and their weights; tokens past the last weight do not pass.

    `best` is `row.best`. Without `logits`, the candidates are treated as the full row.
    """
    values, token_ids = _best_of(row, params.top_k)
    return token_ids, _filtered(values, weights_of(values, best, scale_of(params.temperature)), params)


def _best_of(row: Candidates, top_k: int) -> tuple[Floats, Ints]:
    """Returns the `top_k` best logits and their tokens, best first; without `top_k`, the candidates."""
    if row.logits is not None and len(row.token_ids) < top_k:
        token_ids = leading(row.logits, top_k)
        return row.logits[token_ids], token_ids
    num_kept = top_k or len(row.token_ids)
    return row.values[:num_kept], row.token_ids[:num_kept]


def _filtered(values: Floats, weights: Ints, params: SamplingParams) -> Ints:
    """Returns the leading `weights` of logits `values` that pass top-p and min-p; the first always passes.

    Weights that do not pass HOST_FILTERS are set to 0.
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
    """Returns True if a filter is on that only the host applies."""
    return any(getattr(params, name) != off for name, off in _OFF.items())


def host_filtered(values: Floats, weights: Ints, params: SamplingParams) -> Ints:
    """Returns the weights, in any order, with those that do not pass HOST_FILTERS set to 0."""
    for name, passing in HOST_FILTERS.items():
        if (value := getattr(params, name)) != _OFF[name]:
            weights = passing(values, weights, value)
    return weights


def typical(values: Floats, weights: Ints, mass: float) -> Ints:
    """Keeps the most typical tokens of this mass.

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


# Functions of logits, weights (0: already dropped) and the parameter's value that set weights to 0, by the
# name of their parameter, in the order of application.
HOST_FILTERS: Mapping[str, Callable[[Floats, Ints, float], Ints]] = {"typical_p": typical}
_OFF = {name: PARAMS[name].default for name in HOST_FILTERS}
