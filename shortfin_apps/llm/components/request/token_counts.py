"""Token counts: which tokens a request has seen, and how often it has generated each of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class TokenCounts:
    """Counts of a sequence that only grows; the first `num_prompt` tokens are seen, but not counted.

    A step adds one token, so the time to catch up does not depend on the sequence's length. `token_ids` are
    the distinct tokens, and `counts` how often each was generated, both as 64-bit integers in order of first
    appearance; `places` maps a token ID to its index.
    """

    def __init__(self, num_prompt: int) -> None:
        self.token_ids, self.counts = array("q"), array("q")
        self._num_prompt = num_prompt
        self._num_read = 0
        self.places: dict[int, int] = {}

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """Read the new tokens of `token_ids`, which must extend the last call's."""
        for position in range(self._num_read, len(token_ids)):
            place = self.places.setdefault(token_ids[position], len(self.places))
            if place == len(self.token_ids):
                self.token_ids.append(token_ids[position])
                self.counts.append(0)
            self.counts[place] += position >= self._num_prompt
        self._num_read = len(token_ids)
