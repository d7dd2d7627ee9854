"""Row edits: the adjustments of one row of logits, encoded for a device that applies them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.request.grammar import Bitmask
from shortfin_apps.llm.components.request.request import TokenCounts
from shortfin_apps.llm.contract.abi import KEPT, EditField, PenaltyField

Ints32 = npt.NDArray[np.int32]
Ints64 = npt.NDArray[np.int64]
Floats32 = npt.NDArray[np.float32]

_NONE: Ints64 = np.empty(0, np.int64)

_WORD_OCTETS = 4
_FIRST_OCTETS = 64
_NO_PENALTIES = tuple(float(field is PenaltyField.REPETITION) for field in PenaltyField)


class RowEdits:
    """Bans, biases and penalties of one row; `abi.py` specifies how a device applies them.

    `penalties` is indexed by PenaltyField; the counts that they depend on are not part of the edits. A token
    that several adjustments name has one edit.
    """

    __slots__ = ("_biases", "allowed", "has_penalties", "penalties")

    def __init__(self) -> None:
        self.penalties: Sequence[float] = _NO_PENALTIES
        self.has_penalties = False
        self._biases: dict[int, float] = {}
        self.allowed: Bitmask | None = None  # None: all tokens are allowed

    @property
    def has_biases(self) -> bool:
        return bool(self._biases)

    def ban(self, token_ids: Iterable[int]) -> None:
        self._biases |= dict.fromkeys(token_ids, -math.inf)

    def bias(self, token_ids: Iterable[int], biases: Iterable[float]) -> None:
        """Add biases of distinct tokens; banned tokens stay banned. Callers must pass all in one call."""
        for token_id, bias in zip(token_ids, biases, strict=True):
            self._biases[token_id] = self._biases.get(token_id, 0.0) + bias

    def penalise(self, field: PenaltyField, penalty: float) -> None:
        """Set a penalty for the tokens of prompt and output."""
        self.penalties = [*self.penalties]
        self.penalties[field] = penalty
        self.has_penalties = True

    def allow(self, bitmask: Bitmask) -> None:
        """Ban the tokens with a 0 bit, and tokens past the end of the bitmask.

        The edits keep the bitmask itself, so callers must use them before the bitmask changes.
        """
        if self.allowed is not None:
            length = min(len(bitmask), len(self.allowed))
            bitmask = (_octets(bitmask)[:length] & _octets(self.allowed)[:length]).tobytes()
        self.allowed = bitmask

    def may_ban_all(self) -> bool:
        """Return whether the allowed tokens and the bans may leave no token."""
        if self.allowed is None:
            return False
        num_banned = sum(bias == -math.inf for bias in self._biases.values()) if self._biases else 0
        if not num_banned:  # mostly, a token among the first ones is allowed
            return not any(self.allowed[:_FIRST_OCTETS]) and not _octets(self.allowed).any()
        return int(np.bitwise_count(_octets(self.allowed)).sum()) <= num_banned

    def of_tokens(self, seen: TokenCounts | None, vocab_size: int) -> tuple[Ints64, Ints64, Floats32 | None]:
        """Return token IDs, counts and biases of the edits [edits]; no biases if all are 0.

        With `seen`, the edits set the counts of all of its tokens; without, they keep the counts of the
        device's table. The arrays may share memory with `seen`: callers must drop them before the next token.
        """
        if seen is None:
            known, counts = _NONE, _NONE
        else:
            known, counts = _viewed(seen.token_ids), _viewed(seen.counts)
        if not self._biases:
            return known, counts, None
        return self._with_biases(known, counts, {} if seen is None else seen.places, vocab_size)

    def _with_biases(
        self, seen: Ints64, counts: Ints64, places: Mapping[int, int], vocab_size: int
    ) -> tuple[Ints64, Ints64, Floats32]:
        """Return IDs, counts and biases of all tokens that are in `seen` (at `places`) or have a bias."""
        new = [each for each in self._biases if each not in places and each < vocab_size]
        biases = np.zeros(len(seen) + len(new), np.float32)
        biases[len(seen) :] = [self._biases[token_id] for token_id in new]
        for token_id, bias in self._biases.items():
            if token_id in places:
                biases[places[token_id]] = bias
        counts = np.concatenate([counts, np.full(len(new), KEPT)])
        return np.concatenate([seen, np.array(new, np.int64)]), counts, biases


def joined(edits: Sequence[RowEdits], seen: Sequence[TokenCounts | None], vocab_size: int) -> Ints32:
    """Return the edits of several rows [fields, E], indexed by EditField; ROW is an index into `edits`.

    `seen` has the counts of each row that the device's table lacks. Edits of tokens outside the model's
    vocabulary are left out. All rows are joined at once, because a step of penalised requests may have
    thousands of edits.
    """
    if not any(map(_has_tokens, edits, seen)):
        return np.zeros((len(EditField), 0), np.int32)
    of_rows = [of_row.of_tokens(counts, vocab_size) for of_row, counts in zip(edits, seen, strict=True)]
    token_ids, counts, biases = zip(*of_rows, strict=True)
    lengths = [len(of_row) for of_row in token_ids]
    columns = np.zeros((len(EditField), sum(lengths)), np.int32)
    columns[EditField.ROW] = np.repeat(np.arange(len(edits), dtype=np.int32), lengths)
    np.concatenate(token_ids, out=columns[EditField.TOKEN_ID])
    np.concatenate(counts, out=columns[EditField.COUNT])
    for of_row, end in zip(biases, accumulate(lengths), strict=True):
        if of_row is not None:
            columns[EditField.BIAS, end - len(of_row) : end] = of_row.view(np.int32)
    # Without a repetition penalty, tokens that only occur in the prompt are unchanged.
    changes_all = np.array([of_row.penalties[PenaltyField.REPETITION] != 1 for of_row in edits])
    is_changed = np.repeat(changes_all, lengths)
    is_changed |= (columns[EditField.COUNT] > 0) | (columns[EditField.BIAS] != 0)
    is_changed &= columns[EditField.TOKEN_ID] < vocab_size
    return columns if is_changed.all() else columns.take(np.flatnonzero(is_changed), axis=1)


def joined_bitmasks(allowed: Sequence[Bitmask], vocab_size: int) -> Ints32:
    """Return the bitmasks of `RowEdits.allowed` as [rows, ceil(vocab_size / 32)], lowest token first."""
    size = words_of(vocab_size) * _WORD_OCTETS
    rows = [each if len(each) == size else bytes(each[:size]).ljust(size, b"\0") for each in allowed]
    joined = np.frombuffer(bytearray().join(rows), "<i4").astype(np.int32, copy=False)
    return joined.reshape(len(rows), words_of(vocab_size))


def _has_tokens(edits: RowEdits, seen: TokenCounts | None) -> bool:
    return seen is not None or edits.has_biases


def _octets(bitmask: Bitmask) -> npt.NDArray[np.uint8]:
    return np.frombuffer(bitmask, np.uint8)


def _viewed(values: array[int]) -> Ints64:
    return np.frombuffer(values, np.int64) if values else _NONE


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
