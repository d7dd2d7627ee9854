"""The next token of one row, from what the device handed back.

The device returns the row's best K logits, best first. Greedy and top-k sampling with k <= K need no
more; anything that depends on the whole distribution (nucleus sampling without top-k, log-probabilities)
needs the row's logits, of which only as many are sorted as the filters can keep. Filters apply in the
order temperature, top_k, top_p, min_p.

A draw depends on the request's seed and the token's index in its output, and on nothing else: no state
is carried, so a seed means the same whatever runs beside it and after a preemption.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.request.messages import TokenLogprobs
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.errors import InvocationError

NOT_FINITE = "the model returned logits that are not finite numbers"
FIRST_LOOK = 64  # of a row that comes without candidates, how many are sorted at first
Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Candidates:
    """One row's candidates, best first: `values` and `indices` are `[K]`; `logits` is `[V]` or None."""

    values: Floats
    indices: Ints
    logits: Floats | None

    @property
    def best(self) -> float:
        """The greatest logit; NaN where there is none, or where one is, as far as is known of the row."""
        if self.logits is not None:
            return float(self.logits.max())
        return float(self.values[0]) if len(self.values) else math.nan


def banned_tokens(request: Request, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Tokens that would end the request before its `min_tokens`."""
    params = request.call.params
    if request.num_generated >= params.min_tokens:
        return frozenset()
    return params.stop_token_ids | eos_token_ids


def needs_logits(params: SamplingParams, num_banned: int, num_candidates: int) -> bool:
    """Whether the device's best `num_candidates` logits are too few to choose from exactly."""
    if params.logprobs is not None:
        return True
    width = 1 if params.greedy else params.top_k
    return width == 0 or width + num_banned > num_candidates


def choose(row: Candidates, request: Request, banned: frozenset[int]) -> int:
    """The next token id. Raises InvocationError when the logits are not numbers."""
    params = request.call.params
    row = _without(row, banned)
    best = row.best
    if not np.isfinite(best):
        raise InvocationError(NOT_FINITE)
    if params.greedy:
        return int(row.indices[0] if len(row.indices) else _argmax(row.logits))
    draw = _uniform(request.seed, request.num_generated)
    if row.logits is None:
        return _draw(row.indices, _filtered(_weights(row.values, best, params), None, params), draw)
    weights = _weights(row.logits, best, params)
    if not (params.top_k or params.top_p < 1 or params.min_p > 0):
        return _draw(None, weights, draw)
    indices = row.indices if len(row.indices) else _leading(weights, FIRST_LOOK)
    while not _decides(weights[indices], weights, params):
        indices = _leading(weights, 8 * len(indices))
    return _draw(indices, _filtered(weights[indices], weights, params), draw)


def logprobs_of(logits: Floats, token: int, num_top: int) -> TokenLogprobs:
    """Of the model's own distribution, before temperature and filters. `logits` is `[V]`."""
    wide = logits.astype(np.float64)
    shifted = wide - wide.max()
    logprobs = shifted - np.log(np.exp(shifted).sum())
    top = _leading(logprobs, num_top)
    return TokenLogprobs(float(logprobs[token]), tuple((int(i), float(logprobs[i])) for i in top))


def _without(row: Candidates, banned: frozenset[int]) -> Candidates:
    if not banned:
        return row
    allowed = ~np.isin(row.indices, list(banned))
    logits = None
    if row.logits is not None:
        logits = row.logits.copy()
        logits[[token for token in banned if token < len(logits)]] = -np.inf
    return Candidates(row.values[allowed], row.indices[allowed], logits)


def _argmax(logits: Floats | None) -> int:
    assert logits is not None, "neither candidates nor logits"
    return int(logits.argmax())


def _weights(logits: Floats, best: Any, params: SamplingParams) -> Floats:
    """Unnormalised probabilities; the best has 1."""
    with np.errstate(over="ignore"):  # to minus infinity, whose weight is 0, as it is in the limit
        weights: Floats = np.exp((logits - best) / np.float32(params.temperature))
    return weights


def _leading(values: Floats, count: int) -> Ints:
    """Indices of the `count` largest, best first, ties by lower index; no more is sorted than needed."""
    if count == 0:
        return np.empty(0, np.int64)
    if count >= len(values):
        return np.argsort(-values, kind="stable")
    least = np.partition(values, -count)[-count]
    part = np.flatnonzero(values >= least)
    return part[np.argsort(-values[part], kind="stable")][:count]


def _decides(leading: Floats, weights: Floats, params: SamplingParams) -> bool:
    """Whether whatever the filters keep is among the `leading` ones."""
    if len(leading) == len(weights):
        return True
    if params.top_k and len(leading) >= params.top_k:
        return True
    if params.top_p < 1 and not params.top_k and leading.sum() >= params.top_p * weights.sum():
        return True
    return params.min_p > 0 and params.top_p == 1 and bool(leading[-1] < params.min_p)


def _filtered(leading: Floats, weights: Floats | None, params: SamplingParams) -> Floats:
    """Of descending weights, those that pass; `weights` are the whole row's where that is known."""
    kept = leading[: params.top_k] if params.top_k else leading
    if params.top_p < 1:
        mass = kept.sum() if params.top_k or weights is None else weights.sum()
        before = np.cumsum(kept) - kept
        # The best one passes even where the product is too small for its type.
        kept = kept[: max(1, np.count_nonzero(before < params.top_p * mass))]
    if params.min_p > 0:
        kept = kept[: max(1, np.count_nonzero(kept >= params.min_p))]  # relative to the best's, 1
    return kept


def _draw(indices: Ints | None, weights: Floats, draw: float) -> int:
    """The token at `draw`, in [0, 1), of the weights' mass; `indices` are the weights' tokens.

    Raises InvocationError when the mass is no number: a search in it would end at the last token.
    """
    mass = np.cumsum(weights, dtype=np.float64)
    if not np.isfinite(mass[-1]):
        raise InvocationError(NOT_FINITE)
    position = min(int(np.searchsorted(mass, draw * mass[-1], side="right")), len(weights) - 1)
    return position if indices is None else int(indices[position])


def _uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that is a function of its arguments (Philox, Salmon et al. 2011)."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=index)).random())
