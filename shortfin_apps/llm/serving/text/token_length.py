"""A lower bound of a text's number of tokens, from its length: texts that cannot fit are not tokenised.

The bound holds if each character ends up in some token, and no token covers more characters than its token
string has. This is so with SentencePiece and byte-level vocabularies (token strings have one character per
byte). There is no bound if a normaliser, a pre-tokeniser or the model may drop or merge any number of
characters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers
from tokenizers import models

NEVER_SHORTER = ("Prepend", "NFD", "NFKD", "ByteLevel", "Lowercase")
COMPOSING = ("NFC", "NFKC")
MAX_COMPOSED = 4  # maximum number of characters that canonical composition merges into one (UAX #15)
KEEPING = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")
SPLITTING = ("Split", "Punctuation")
WHITESPACE = tuple(c for c in map(chr, range(0x3001)) if c.isspace())  # there is none above U+3000

Step = Mapping[str, Any]  # a normaliser or pre-tokeniser in the format of tokenizer.json


class TokenLength:
    """Bounds numbers of tokens. `max_chars`: maximum characters that one token covers; None if unknown."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        vocabulary = backend.get_vocab(with_added_tokens=True)
        normalisers = list(_steps(backend.normalizer, "normalizers"))
        splitters = list(_steps(backend.pre_tokenizer, "pretokenizers"))
        byte_level = any(step["type"] == "ByteLevel" for step in (*normalisers, *splitters))
        known = all(map(_keeps_all, splitters)) and _knows_all(backend.model, vocabulary, byte_level)
        self._uncounted = _strippable(backend)
        if byte_level:
            self._uncounted |= {
                char for char in map(chr, range(128)) if ALPHABET[ord(char)] not in vocabulary
            }
        shrinking = [_shrinking(step, self._uncounted) for step in normalisers]
        self.max_chars = None
        if known and None not in shrinking:
            self.max_chars = math.prod(filter(None, shrinking)) * max(map(len, vocabulary))

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of `text`."""
        if self.max_chars is None:
            return 0
        num_chars = len(text) - sum(map(text.count, self._uncounted))
        return -(-num_chars // self.max_chars)


def _steps(outer: Any, inner_name: str) -> Iterable[Step]:
    """Yield the steps of a normaliser or pre-tokeniser, which may be a sequence, a single step or None."""
    if outer is None:
        return
    pending: list[Step] = [json.loads(outer.__getstate__())]
    while pending:
        step = pending.pop()
        if step["type"] == "Sequence":
            pending += step[inner_name]
        else:
            yield step


def _strippable(backend: tokenizers.Tokenizer) -> frozenset[str]:
    """Return the characters that added tokens strip from the text next to them, in any number."""
    added = backend.get_added_tokens_decoder().values()
    return frozenset(WHITESPACE) if any(token.lstrip or token.rstrip for token in added) else frozenset()


def _shrinking(step: Step, uncounted: frozenset[str]) -> int | None:
    """Return how many characters a normaliser merges into one at most; None if unlimited or unknown."""
    if step["type"] in NEVER_SHORTER:
        return 1
    if step["type"] in COMPOSING:
        return MAX_COMPOSED
    if step["type"] == "Replace" and "String" in step["pattern"]:
        kept = [char for char in step["content"] if char not in uncounted]
        return -(-len(step["pattern"]["String"]) // len(kept)) or 1 if kept else None
    return None


def _keeps_all(step: Step) -> bool:
    return step["type"] in KEEPING or (step["type"] in SPLITTING and step["behavior"] != "Removed")


def _knows_all(model: Any, vocabulary: Mapping[str, int], byte_level: bool) -> bool:
    """Return True if the vocabulary has all characters beyond ASCII: a model may drop or merge others.

    Byte-level vocabularies often lack control characters and lead bytes of unassigned characters, but each
    character beyond ASCII has a continuation byte.
    """
    if not isinstance(model, models.BPE):
        return False
    if byte_level:
        return all(ALPHABET[byte] in vocabulary for byte in range(0x80, 0xC0))
    return model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _alphabet() -> list[str]:
    """Return the character that represents each byte in byte-level vocabularies, as in GPT-2."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(shifted)) for byte in range(256)]


ALPHABET = _alphabet()
