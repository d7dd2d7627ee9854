"""Tracks which tokens the pages of a replay hold: a page's K/V depend on all tokens up to its last."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

UNKNOWN_TOKEN = -1  # not a token id of any request


class Held(Enum):
    """How a page's content compares to what a request expects."""

    SAME = "same"
    OTHER = "other"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class _Content:
    """The tokens of a page, and a digest of all tokens before; None if computed from unknown pages."""

    before: bytes | None
    token_ids: list[int]


class KnownPages:
    """Pages of `stride` tokens. State pages depend on all their tokens, so they are compared exactly."""

    def __init__(self, stride: int, *, is_exact: bool = False) -> None:
        self._stride = stride
        self._is_exact = is_exact
        self._pages: dict[int, _Content] = {}

    def held(self, page_ids: Sequence[int], token_ids: Sequence[int], first: int) -> list[tuple[int, Held]]:
        """Return the blocks of `token_ids` from `first` on, each with the state of its page."""
        stride = self._stride
        found = []
        for block, digest in enumerate(_digests(token_ids, stride)):
            expected = token_ids[block * stride : (block + 1) * stride]
            if block >= first:
                found.append((block, self._compare(page_ids[block], digest, expected)))
        return found

    def _compare(self, page_id: int, before: bytes, expected: Sequence[int]) -> Held:
        content = self._pages.get(page_id)
        if content is None or content.before is None:
            return Held.UNKNOWN
        held = content.token_ids if self._is_exact else content.token_ids[: len(expected)]
        return Held.SAME if content.before == before and held == list(expected) else Held.OTHER

    def wrote(self, page_ids: Sequence[int], token_ids: Sequence[int], start: int, *, is_known: bool) -> None:
        """Record writes of the tokens from `start` on; `is_known` is False if unknown pages were read."""
        stride = self._stride
        for block in range(start // stride, -(-len(token_ids) // stride)):
            begin = block * stride
            before = _digest(token_ids[:begin]) if is_known else None
            self._pages[page_ids[block]] = _Content(before, list(token_ids[begin : begin + stride]))

    def forget(self, page_ids: Iterable[int]) -> None:
        """Forget pages that were zeroed."""
        for page_id in page_ids:
            self._pages.pop(page_id, None)


def _digest(token_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.asarray(token_ids, np.int64).tobytes(), digest_size=16).digest()


def _digests(token_ids: Sequence[int], stride: int) -> Iterator[bytes]:
    """Yield a digest of the tokens before each block."""
    sum_ = hashlib.blake2b(digest_size=16)
    for begin in range(0, len(token_ids), stride):
        yield sum_.copy().digest()
        sum_.update(np.asarray(token_ids[begin : begin + stride], np.int64).tobytes())
