"""Candidates: the device's results for one row, from which a token is sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The best K logits of a row, best first: `values[K]` of `token_ids[K]`; plus all `logits[V]` or None.

    K is 0 for an entry without top-k; then `logits` is never None.
    """

    values: Floats
    token_ids: Ints
    logits: Floats | None

    @property
    def best(self) -> float:
        """The greatest logit; NaN if there is none, or if any known logit is NaN."""
        if self.logits is not None:
            return float(self.logits.max())
        return float(self.values[0]) if len(self.values) else math.nan

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.best)

    @property
    def best_token_id(self) -> int:
        """The token with the greatest logit; on a tie the lowest id."""
        if len(self.token_ids):
            return int(self.token_ids[0])
        assert self.logits is not None, "neither candidates nor logits"
        return int(self.logits.argmax())

    def logit_of(self, token_id: int) -> float | None:
        """Returns the token's logit, or None if it is not a candidate and there are no logits."""
        if self.logits is not None:
            return float(self.logits[token_id])
        [places] = np.nonzero(self.token_ids == token_id)
        return float(self.values[places[0]]) if len(places) else None

    def first(self, count: int) -> Candidates:
        """Returns the best `count` candidates, without `logits`."""
        return Candidates(self.values[:count], self.token_ids[:count], None)

    def only(self, kept: npt.NDArray[np.bool]) -> Candidates:
        """Returns the candidates selected by the mask `kept` [K], without `logits`."""
        return Candidates(self.values[kept], self.token_ids[kept], None)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token chosen before the commit, by a device or from candidates; -1 if the logits are not finite.

    `logit` is the token's logit in the row, if the request asked for it.
    """

    token_id: int
    logit: float | None = None

    @property
    def is_finite(self) -> bool:
        return self.token_id >= 0

    def logit_of(self, token_id: int) -> float | None:
        """Like `Candidates.logit_of`, for the drawn token only."""
        assert token_id == self.token_id
        return self.logit


def ranked(values: Floats, token_ids: Ints) -> Candidates:
    """Returns these tokens as candidates without logits: best first, ties by lower id."""
    order = np.lexsort((token_ids, -values))
    return Candidates(values[order], token_ids[order], None)


def leading(values: Floats, count: int) -> Ints:
    """Returns the indices of the `count` largest, best first, ties by lower index, without a full sort."""
    if count == 0:
        return np.empty(0, np.int64)
    if count >= len(values):
        return np.argsort(-values, kind="stable")
    smallest = np.partition(values, -count)[-count]
    part = np.flatnonzero(values >= smallest)
    return part[np.argsort(-values[part], kind="stable")][:count]
