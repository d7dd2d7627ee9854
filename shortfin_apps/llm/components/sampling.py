"""The next token of one row, from what the device handed back.

The device returns the row's best K logits, best first. Greedy and top-k sampling with k <= K need no
more; anything that depends on the whole distribution (nucleus sampling without top-k, log-probabilities)
needs the row's logits. Filters apply in the order temperature, top_k, top_p, min_p.

A draw depends on the request's seed and the token's index in its output, and on nothing else: no state
is carried, so a seed means the same whatever runs beside it and after a preemption.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.messages import TokenLogprobs
from shortfin_apps.llm.components.request import Request
from shortfin_apps.llm.components.sampling_params import SamplingParams
from shortfin_apps.llm.errors import InvocationError

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Candidates:
    """One row's candidates, best first: `values` and `indices` are `[K]`; `logits` is `[V]` or None."""

    values: Floats
    indices: Ints
    logits: Floats | None


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
    values, indices = _candidates(row, banned)
    if not len(values) or not np.isfinite(values[0]):
        raise InvocationError("the model returned logits that are not finite numbers")
    if params.greedy:
        return int(indices[0])
    probs = _filtered_probs(values, params)
    draw = _uniform(request.seed, request.num_generated) * float(probs.sum())
    position = int(np.searchsorted(np.cumsum(probs), draw, side="right"))
    return int(indices[min(position, len(probs) - 1)])


def logprobs_of(logits: Floats, token: int, num_top: int) -> TokenLogprobs:
    """Of the model's own distribution, before temperature and filters. `logits` is `[V]`."""
    wide = logits.astype(np.float64)
    shifted = wide - wide.max()
    logprobs = shifted - np.log(np.exp(shifted).sum())
    top = _best(logprobs, num_top)
    return TokenLogprobs(float(logprobs[token]), tuple((int(i), float(logprobs[i])) for i in top))


def _candidates(row: Candidates, banned: frozenset[int]) -> tuple[Floats, Ints]:
    if row.logits is not None:
        order = _best(row.logits, len(row.logits))
        values, indices = row.logits[order], order
    else:
        values, indices = row.values, row.indices
    if banned:
        allowed = ~np.isin(indices, list(banned))
        values, indices = values[allowed], indices[allowed]
    return values, indices


def _best(values: Floats, count: int) -> Ints:
    """Indices of the `count` largest values, best first, ties by lower index."""
    return np.argsort(-values, kind="stable")[:count]


def _filtered_probs(values: Floats, params: SamplingParams) -> Floats:
    """Unnormalised probabilities of the leading candidates that pass the filters; `values` descend."""
    scaled = values.astype(np.float64) / params.temperature
    if params.top_k:
        scaled = scaled[: params.top_k]
    probs: Floats = np.exp(scaled - scaled[0])
    if params.top_p < 1:
        mass_before = np.cumsum(probs) - probs
        probs = probs[mass_before < params.top_p * probs.sum()]
    if params.min_p > 0:
        probs = probs[probs >= params.min_p]  # relative to the best, whose value is 1 here
    return probs


def _uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that is a function of its arguments (Philox, Salmon et al. 2011)."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=index)).random())
