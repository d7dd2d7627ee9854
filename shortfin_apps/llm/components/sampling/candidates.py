"""Candidates: the device's results for one row (the logits at one position of a request)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The best K logits of a row: `values` [K], best first, and their `token_ids` [K].

    `logits` [V] are all logits of the row, or None if they were not fetched. An entry without top-k has K = 0
    and always `logits`.
    """

    values: Floats
    token_ids: Ints
    logits: Floats | None

    @property
    def best(self) -> float:
        """The greatest logit; NaN if there are no logits, or if any known logit is NaN."""
        if self.logits is not None:
            return float(self.logits.max())
        return float(self.values[0]) if len(self.values) else math.nan

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.best)

    @property
    def best_token_id(self) -> int:
        """The token with the greatest logit; in a tie the one with the lowest ID."""
        if len(self.token_ids):
            return int(self.token_ids[0])
        assert self.logits is not None, "neither candidates nor logits"
        return int(self.logits.argmax())

    def logit_of(self, token_id: int) -> float | None:
        """Return the token's logit, or None if the token is not a candidate and the row has no `logits`."""
        if self.logits is not None:
            return float(self.logits[token_id])
        [places] = np.nonzero(self.token_ids == token_id)
        return float(self.values[places[0]]) if len(places) else None

    def first(self, count: int) -> Candidates:
        """Return the best `count` candidates, without `logits`."""
        return Candidates(self.values[:count], self.token_ids[:count], None)

    def only(self, kept: npt.NDArray[np.bool]) -> Candidates:
        """Return the candidates selected by the mask `kept` [K], without `logits`."""
        return Candidates(self.values[kept], self.token_ids[kept], None)


class LogprobTerms(NamedTuple):
    """The terms of a row's log-probabilities (`sampling_rule.py`), before adjustments.

    `mass` is the sum of the row's weights, `logit` and `rank` are those of its token. `values` [K], best
    first, are the logits of the best tokens, at least one, and `token_ids` [K] are these tokens.
    """

    mass: int
    logit: float
    rank: int
    values: Sequence[float]
    token_ids: Sequence[int]

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.values[0])


class Drawn(NamedTuple):
    """A token chosen before `Sampler.sample` is called: by the device, or by `Sampler.decided`.

    `token_id` is -1 if the row's logits are not finite. `logit` is the token's logit in the row, or None
    unless the request asked for logits. `terms` are None unless the device computed them.
    """

    token_id: int
    logit: float | None = None
    terms: LogprobTerms | None = None

    @property
    def is_finite(self) -> bool:
        return self.token_id >= 0

    def logit_of(self, token_id: int) -> float | None:
        """Return the drawn token's logit, or None if it is not known. Callers must pass the drawn token."""
        assert token_id == self.token_id
        return self.logit


def ranked(values: Floats, token_ids: Ints) -> Candidates:
    """Return these tokens as candidates without `logits`: best first, ties by lower ID."""
    order = np.lexsort((token_ids, -values))
    return Candidates(values[order], token_ids[order], None)


def leading(values: Floats, count: int) -> Ints:
    """Return the indices of the `count` largest values, largest first, ties by lower index.

    Sorts only values that are at least as large as the last one returned.
    """
    if count == 0:
        return np.empty(0, np.int64)
    if count >= len(values):
        return np.argsort(-values, kind="stable")
    smallest = np.partition(values, -count)[-count]
    part = np.flatnonzero(values >= smallest)
    return part[np.argsort(-values[part], kind="stable")][:count]
