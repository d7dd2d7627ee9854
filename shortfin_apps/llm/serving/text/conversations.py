"""Remembers the token ids of conversations by the text of the conversation.

A model often generates other tokens than the tokenizer would use for the same text. When a client sends a
conversation back as text with one more message, the tokenised text would therefore differ from the KV cache
from the middle of the last answer on.
"""

from __future__ import annotations

import hashlib
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple

_DIGEST_BYTES = 16

Key = tuple[str | None, bytes]


class Recalled(NamedTuple):
    """A remembered prefix of a text: its length in characters, and its token ids."""

    num_chars: int
    token_ids: tuple[int, ...]


NOTHING = Recalled(0, ())


class Conversations:
    """Remembers the most recently used conversations, with at most `max_tokens` token ids in total.

    `names`: strings of tokens at which the tokenizer first splits every text. A prefix is recalled only if
    one of these follows, so that the remainder can be tokenised separately. A conversation is recalled only
    for the salt it was stored with. Thread-safe.
    """

    def __init__(self, names: Collection[str], max_tokens: int) -> None:
        longest_first = sorted((name for name in names if name), key=len, reverse=True)
        self._boundary = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._max_tokens = max_tokens
        self._known: OrderedDict[Key, array[int]] = OrderedDict()
        self._num_tokens = 0
        self._lock = threading.Lock()  # guards `_known` and `_num_tokens`

    def remember(self, text: str, token_ids: Sequence[int], salt: str | None) -> None:
        """Store the `token_ids` of `text`, a conversation up to the end of an answer."""
        key = (salt, _hash(text).digest())
        with self._lock:
            self._num_tokens += len(token_ids) - len(self._known.pop(key, ()))
            self._known[key] = array("I", token_ids)
            while self._num_tokens > self._max_tokens:
                _, oldest = self._known.popitem(last=False)
                self._num_tokens -= len(oldest)

    def recall(self, text: str, salt: str | None) -> Recalled:
        """Return the longest remembered prefix of `text`, or NOTHING. Slow for a text with many `names`."""
        if not self._known:
            return NOTHING
        hashed, done, beginnings = _hash(""), 0, []
        for match in self._boundary.finditer(text):
            hashed.update(_encoded(text[done : match.start()]))
            done = match.start()
            beginnings.append((done, hashed.digest()))
        with self._lock:
            for num_chars, digest in reversed(beginnings):
                if (token_ids := self._known.get((salt, digest))) is not None:
                    self._known.move_to_end((salt, digest))
                    return Recalled(num_chars, tuple(token_ids))
        return NOTHING


def _hash(text: str) -> hashlib.blake2b:
    return hashlib.blake2b(_encoded(text), digest_size=_DIGEST_BYTES)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
