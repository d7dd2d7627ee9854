"""How few tokens a text can have, from its length alone: what cannot fit need not be tokenised.

That holds where each character ends up in some token, and no token stands for more characters than its name
in the vocabulary has (SentencePiece's words do, and byte-level ones, whose names have one for each byte).
Where a normaliser, a splitter or the model itself may drop or merge characters without limit, nothing is
known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

NEVER_SHORTER = ("Prepend", "NFD", "NFKD", "ByteLevel", "Lowercase")
COMPOSING = ("NFC", "NFKC")
MAX_COMPOSED = 4  # characters that canonical composition makes one of, at most (UAX #15)
KEEPING = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")
SPLITTING = ("Split", "Punctuation")
WHITESPACE = tuple(c for c in map(chr, range(0x3001)) if c.isspace())  # there is none above

Step = Mapping[str, Any]  # of a normaliser or pre-tokeniser, as tokenizer.json has it


class TokenLength:
    """`max_chars` is how many characters of a text one token can stand for, None if nothing is known."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        vocabulary = backend.get_vocab(with_added_tokens=True)
        added = backend.get_added_tokens_decoder().values()
        # Such a token swallows any number of spaces beside it.
        self._ignores_space = any(token.lstrip or token.rstrip for token in added)
        self.max_chars = _max_chars(backend, vocabulary)

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of its tokens."""
        if self.max_chars is None:
            return 0
        num_chars = len(text)
        if self._ignores_space:
            num_chars -= sum(map(text.count, WHITESPACE))
        return -(-num_chars // self.max_chars)


def _max_chars(backend: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> int | None:
    normalisers = list(_steps(backend.normalizer, "normalizers"))
    splitters = list(_steps(backend.pre_tokenizer, "pretokenizers"))
    shrinking = 1
    for step in normalisers:
        factor = _shrinking(step)
        if factor is None:
            return None
        shrinking *= factor
    byte_level = any(step["type"] == "ByteLevel" for step in (*normalisers, *splitters))
    if not all(map(_keeps_all, splitters)) or not _knows_every_byte(backend.model, vocabulary, byte_level):
        return None
    return shrinking * max(map(len, vocabulary))


def _steps(outer: Any, inner_name: str) -> Iterable[Step]:
    """The steps of a sequence of them, of a single one, or of none."""
    if outer is None:
        return
    pending: list[Step] = [json.loads(outer.__getstate__())]
    while pending:
        step = pending.pop()
        if step["type"] == "Sequence":
            pending += step[inner_name]
        else:
            yield step


def _shrinking(step: Step) -> int | None:
    """How many characters a normaliser makes one of, at most; None if any number, or nobody knows."""
    if step["type"] in NEVER_SHORTER:
        return 1
    if step["type"] in COMPOSING:
        return MAX_COMPOSED
    if step["type"] == "Replace" and "String" in step["pattern"] and step["content"]:
        return -(-len(step["pattern"]["String"]) // len(step["content"])) or 1
    return None


def _keeps_all(step: Step) -> bool:
    return step["type"] in KEEPING or (step["type"] in SPLITTING and step["behavior"] != "Removed")


def _knows_every_byte(model: Any, vocabulary: Mapping[str, int], byte_level: bool) -> bool:
    """Then no character is unknown to the model, which may drop those, or merge a run of them."""
    if not isinstance(model, models.BPE):
        return False
    if byte_level:
        return all(char in vocabulary for char in pre_tokenizers.ByteLevel.alphabet())
    return model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
