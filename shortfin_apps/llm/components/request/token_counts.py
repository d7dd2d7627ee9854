"""Token counts: which tokens a request has seen, and how often it has generated each of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


class TokenCounts:
    """Counts of a sequence that only grows; the first `num_prompt` tokens are seen, but not counted.

    A step adds one token, so catching up takes no time in the length of the sequence.
    """

    def __init__(self, num_prompt: int) -> None:
        self._num_prompt = num_prompt
        self._num_read = 0
        self._places: dict[int, int] = {}  # token id: its index in the arrays
        self._token_ids: Int64s = np.empty(64, np.int64)
        self._counts: Int64s = np.zeros(64, np.int64)

    def catch_up(self, token_ids: Sequence[int]) -> tuple[Int64s, Int64s]:
        """The distinct tokens of `token_ids`, and how often each was generated: views, not to be written.

        `token_ids` must begin with those of the last call.
        """
        for position in range(self._num_read, len(token_ids)):
            place = self._place_of(token_ids[position])
            self._counts[place] += position >= self._num_prompt
        self._num_read = len(token_ids)
        num_seen = len(self._places)
        return self._token_ids[:num_seen], self._counts[:num_seen]

    def _place_of(self, token_id: int) -> int:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._token_ids):
            self._token_ids = np.resize(self._token_ids, 2 * place)
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._token_ids[place] = token_id
        return place
