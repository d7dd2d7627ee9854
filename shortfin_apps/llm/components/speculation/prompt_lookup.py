"""Prompt lookup: proposes the tokens that followed an earlier occurrence of a request's last tokens.

The index works like LZ77's match finder with hash chains. It stores the latest position of each pair of
tokens, and for each position the previous position of the same pair. A lookup follows this chain for a few
steps and returns the longest match. Adding a token and looking up take constant time for any sequence length.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from shortfin_apps.llm.components.speculation.acceptance import Acceptance

WINDOW_TOKENS = 8192  # how far back a lookup searches; bounds the index's memory to about 1 MiB
ADDED_AT_ONCE = 1024  # tokens indexed per call, so that a long prompt does not delay a step
CHAIN_LENGTH = 8  # number of earlier positions compared
LONGEST_MATCH = 32  # tokens; longer matches are no better
_NONE = -1
_TOKEN_BITS = 32


class Match(NamedTuple):
    """A match: the `length` tokens before position `end` equal the last `length` tokens of the sequence."""

    end: int
    length: int


class NgramIndex:
    """An index of the token pairs in the last WINDOW_TOKENS of one growing sequence."""

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}  # by pair, the position of its second token
        self._earlier = array(
            "q"
        )  # by position modulo WINDOW_TOKENS: the previous position of the same pair, or _NONE
        self._num_added = 1  # lower positions are in the index; the first token ends no pair

    def longest_match(self, token_ids: Sequence[int]) -> Match | None:
        """Return the longest match at earlier occurrences of the sequence's last two tokens.

        Compares the latest CHAIN_LENGTH occurrences; in a tie, returns the latest. Returns None if there is
        no occurrence, or if tokens are still to be indexed. `token_ids` must extend the previous call's.
        """
        last = len(token_ids) - 1
        self._add(token_ids, min(last, self._num_added + ADDED_AT_ONCE))
        if last < 1 or self._num_added < last:
            return None
        best: Match | None = None
        position = self._latest.get(_pair(token_ids, last), _NONE)
        for _ in range(CHAIN_LENGTH):
            if position <= last - WINDOW_TOKENS or position == _NONE:
                break
            length = _common_suffix(token_ids, position, last)
            if best is None or length > best.length:
                best = Match(position + 1, length)
            if length == LONGEST_MATCH:
                break
            position = self._earlier[position % WINDOW_TOKENS]
        return best

    def _add(self, token_ids: Sequence[int], stop: int) -> None:
        """Add the pairs that end before position `stop`, and drop pairs that left the window."""
        if not self._earlier:
            self._earlier.append(_NONE)  # of position 0, which ends no pair
        for position in range(self._num_added, stop):
            pair = _pair(token_ids, position)
            earlier = self._latest.get(pair, _NONE)
            if position < WINDOW_TOKENS:
                self._earlier.append(earlier)
            else:
                self._forget(token_ids, position - WINDOW_TOKENS)
                self._earlier[position % WINDOW_TOKENS] = earlier
            self._latest[pair] = position
        self._num_added = max(self._num_added, stop)

    def _forget(self, token_ids: Sequence[int], position: int) -> None:
        """Drop the pair that ends at `position`, unless the pair has occurred again later."""
        if position and self._latest.get(pair := _pair(token_ids, position)) == position:
            del self._latest[pair]


def continuation(token_ids: Sequence[int], end: int, count: int) -> list[int]:
    """Return `count` tokens from position `end` on, repeated cyclically if the sequence ends first."""
    known = list(token_ids[end : end + count])
    while len(known) < count:
        known += known[: count - len(known)]
    return known


def _pair(token_ids: Sequence[int], position: int) -> int:
    return token_ids[position - 1] << _TOKEN_BITS | token_ids[position]


def _common_suffix(token_ids: Sequence[int], position: int, last: int) -> int:
    """Return how many tokens up to `position` equal those up to `last`; at most LONGEST_MATCH.

    Callers must know that at least 2 are equal.
    """
    length = 2
    most = min(LONGEST_MATCH, position + 1)
    while length < most and token_ids[position - length] == token_ids[last - length]:
        length += 1
    return length


class PromptLookup:
    """Proposes tokens for one request: as many as the acceptance of its past proposals justifies.

    At most `max_tokens` are proposed at once. Memory is bounded. Callers may replace a PromptLookup by a new
    one at any time.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._index = NgramIndex()
        self._acceptance = Acceptance()
        self._match: Match | None = None  # the match of the last proposal

    def num_worth(self, token_ids: Sequence[int], least: float, most: int) -> int:
        """Return how many tokens, up to `most`, would each be right with a probability above `least`."""
        self._match = match = self._index.longest_match(token_ids)
        most = min(most, self._max_tokens)
        if match is None or most <= 0:
            return 0
        count = self._acceptance.num_worth(match.length, least, most)
        if not count:
            self._acceptance.pass_over(match.length)
        return count

    def propose(self, token_ids: Sequence[int], least: float, most: int) -> list[int]:
        """Return `num_worth` tokens that are likely to follow `token_ids`, the prompt and output so far."""
        count = self.num_worth(token_ids, least, most)
        return [] if self._match is None else continuation(token_ids, self._match.end, count)

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        """Record that `num_accepted` of the last proposal's first `num_proposed` tokens were accepted."""
        assert self._match is not None, "nothing was proposed"
        self._acceptance.observe(self._match.length, num_proposed, num_accepted)
