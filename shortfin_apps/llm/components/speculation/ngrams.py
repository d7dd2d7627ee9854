"""N-grams: where the last tokens of a sequence stood before in it, and so what may follow (prompt lookup).

The index is the match finder of LZ77 with hash chains: the latest position of each pair of tokens, and for
each position the one before it of the same pair. A lookup follows the chain for a few steps and keeps the
longest match. Adding a token and looking up take constant time, whatever the length of the sequence.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

WINDOW_TOKENS = 8192  # how far back it looks; what bounds its memory, to about 1 MiB
ADDED_AT_ONCE = 1024  # tokens, so that a long prompt does not hold up a step
CHAIN_LENGTH = 8  # earlier positions that are compared
LONGEST_MATCH = 32  # tokens; what is longer is as good
_NONE = -1
_TOKEN_BITS = 32


class Match(NamedTuple):
    """`length` tokens before position `end` of the sequence are its last ones."""

    end: int
    length: int


class NgramIndex:
    """The pairs of tokens of one growing sequence, up to WINDOW_TOKENS back."""

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}  # by pair, the position of its second token
        self._earlier = array(
            "q"
        )  # by position modulo WINDOW_TOKENS, the next one of the same pair, or _NONE
        self._num_added = 1  # positions below are in the index; the first token ends no pair

    def longest_match(self, token_ids: Sequence[int]) -> Match | None:
        """The longest of the last few earlier places of what `token_ids` ends with, the latest if several.

        None if its last two tokens were not seen together, or if tokens are still to be added. The sequence
        may only have grown since the last call.
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
        """Adds the pairs that end before position `stop`, and drops those that the window has passed."""
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
        """Drops a position to which no later one of its pair was added."""
        if position and self._latest.get(pair := _pair(token_ids, position)) == position:
            del self._latest[pair]


def continuation(token_ids: Sequence[int], end: int, count: int) -> list[int]:
    """`count` tokens from position `end` on; where the sequence ends, it goes on with them."""
    known = list(token_ids[end : end + count])
    while len(known) < count:
        known += known[: count - len(known)]
    return known


def _pair(token_ids: Sequence[int], position: int) -> int:
    return token_ids[position - 1] << _TOKEN_BITS | token_ids[position]


def _common_suffix(token_ids: Sequence[int], position: int, last: int) -> int:
    """How many tokens up to `position` equal those up to `last`, of which two do; at most LONGEST_MATCH."""
    length = 2
    most = min(LONGEST_MATCH, position + 1)
    while length < most and token_ids[position - length] == token_ids[last - length]:
        length += 1
    return length
