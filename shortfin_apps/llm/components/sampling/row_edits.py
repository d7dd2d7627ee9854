"""Row edits: the adjustments of one row of logits, encoded for a device that applies them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.request.request import TokenCounts
from shortfin_apps.llm.contract.abi import NOT_SEEN, EditField, PenaltyField

Ints32 = npt.NDArray[np.int32]
Octets = npt.NDArray[np.uint8]

_WORD_OCTETS = 4


class RowEdits:
    """Bans, biases and penalties of one row; `abi.py` specifies how a device applies them.

    `penalties` is indexed by PenaltyField. A token that several adjustments name has one edit.
    """

    def __init__(self) -> None:
        self.penalties = [0.0] * len(PenaltyField)
        self.penalties[PenaltyField.REPETITION] = 1.0
        self._biases: dict[int, float] = {}
        self._seen: TokenCounts | None = None
        self._allowed: Octets | None = None
        self._columns: Ints32 | None = None

    def ban(self, token_ids: Iterable[int]) -> None:
        self._biases |= dict.fromkeys(token_ids, -math.inf)

    def bias(self, token_ids: Iterable[int], biases: Iterable[float]) -> None:
        """Add biases of distinct tokens; banned tokens stay banned. Callers must pass all in one call."""
        for token_id, bias in zip(token_ids, biases, strict=True):
            self._biases[token_id] = self._biases.get(token_id, 0.0) + bias

    def penalise(self, field: PenaltyField, penalty: float, seen: TokenCounts) -> None:
        """Set a penalty for the tokens in `seen`. Callers must have called `seen.catch_up` in this step."""
        self.penalties[field] = penalty
        self._seen = seen

    def allow(self, bitmask: bytes) -> None:
        """Ban the tokens with a 0 bit (lowest token ID first), and tokens past the end of the bitmask."""
        octets = np.frombuffer(bitmask, np.uint8)
        if self._allowed is not None:
            length = min(len(octets), len(self._allowed))
            octets = octets[:length] & self._allowed[:length]
        self._allowed = octets

    def allowed(self, vocab_size: int) -> Ints32 | None:
        """Return the bitmask of allowed tokens [ceil(vocab_size / 32)], lowest token first.

        Returns None if `allow` was not called.
        """
        if self._allowed is None:
            return None
        octets = np.zeros(words_of(vocab_size) * _WORD_OCTETS, np.uint8)
        known = self._allowed[: len(octets)]
        octets[: len(known)] = known
        return octets.view("<i4").astype(np.int32, copy=False)

    def may_ban_all(self) -> bool:
        """Return whether the allowed tokens and the bans may leave no token."""
        if self._allowed is None:
            return False
        banned = [token_id for token_id, bias in self._biases.items() if bias == -math.inf]
        return int(np.bitwise_count(self._allowed).sum()) <= len(banned)

    def columns(self, vocab_size: int) -> Ints32:
        """Return the edits [fields, edits], indexed by EditField; field ROW is left 0 for the caller to set.

        Edits of tokens outside the model's vocabulary are left out.
        """
        self.finish()
        columns = self._columns
        assert columns is not None, "finished"
        is_known = columns[EditField.TOKEN_ID] < vocab_size
        return columns if is_known.all() else columns[:, is_known]

    def finish(self) -> None:
        """Build the array that `columns` returns; bans, biases and penalties added later do not change it."""
        if self._columns is None:
            self._columns = self._all_columns()

    def _all_columns(self) -> Ints32:
        token_ids, counts = self._seen_tokens()
        biases = np.zeros(len(token_ids), np.float32)
        if self._biases:
            token_ids, counts, biases = self._with_biases(token_ids, counts)
        columns = np.zeros((len(EditField), len(token_ids)), np.int32)
        columns[EditField.TOKEN_ID] = token_ids
        columns[EditField.COUNT] = counts
        columns[EditField.BIAS] = biases.view(np.int32)
        if self.penalties[PenaltyField.REPETITION] != 1:
            return columns
        return columns[:, (counts > 0) | (biases != 0)]  # tokens that only occur in the prompt are unchanged

    def _seen_tokens(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        if self._seen is None:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return np.array(self._seen.token_ids), np.array(self._seen.counts)

    def _with_biases(
        self, seen: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return IDs, counts and biases of all tokens that are in prompt or output, or have a bias."""
        places = {} if self._seen is None else self._seen.places
        new = [token_id for token_id in self._biases if token_id not in places]
        biases = np.zeros(len(seen) + len(new), np.float32)
        biases[len(seen) :] = [self._biases[token_id] for token_id in new]
        for token_id, bias in self._biases.items():
            if token_id in places:
                biases[places[token_id]] = bias
        counts = np.concatenate([counts, np.full(len(new), NOT_SEEN)])
        return np.concatenate([seen, np.array(new, np.int64)]), counts, biases


def words_of(vocab_size: int) -> int:
    """Return the number of 32-bit words for one bit per token."""
    return -(-vocab_size // (8 * _WORD_OCTETS))


@lru_cache(maxsize=256)
def bitmask_of(token_ids: frozenset[int]) -> bytes:
    """Return a bitmask with one bit per token ID up to the greatest of `token_ids`, lowest first.

    Lookups in this cache are fast: every step of a request passes the same set object.
    """
    bits = np.zeros(max(token_ids, default=-1) + 1, bool)
    bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").tobytes()
