"""Escapes special tokens that are written in message contents, so that they are tokenised as plain text.

A chat template renders special tokens and contents into one text, in which a tokenizer cannot distinguish
special tokens of the template from contents that name them. Therefore, before the template runs, the first
character of each token string in a content is replaced by a placeholder. A modified tokenizer encodes the
rendered text: it finds special tokens first, then restores the replaced characters, and tokenises the
remainder as usual. A name is the token string of a special token.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers

from shortfin_apps.llm.contract.errors import ArtifactError

logger = logging.getLogger(__name__)

REPLACEMENT = "\ufffd"  # replaces placeholder characters that a content already has
PLACEHOLDERS = [chr(point) for point in range(0xFDD0, 0xFDF0)]  # Unicode noncharacters, for internal use

MAX_NAME_CHARS = 256  # of a special token; the work grows with the square of the length


class ContentEscape:
    """Escapes the special tokens of `backend`.

    Raises ArtifactError if there are too few placeholders, or a name is too long.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        self._tokens = {i: token.content for i, token in added.items() if token.special}
        names = list(self._tokens.values())
        self._longest = max(map(len, names), default=0)
        if self._longest > MAX_NAME_CHARS:
            raise ArtifactError(
                f"a special token of the tokenizer has {self._longest:,} characters, but only"
                f" {MAX_NAME_CHARS} can be escaped; serve it without --no-special-in-content"
            )
        first = sorted({name[0] for name in names})
        if len(first) > len(PLACEHOLDERS):
            raise ArtifactError(
                f"the tokenizer's special tokens begin with {len(first)} different characters, but only"
                f" {len(PLACEHOLDERS)} can be escaped; serve it without --no-special-in-content"
            )
        self._placeholders = dict(zip(first, PLACEHOLDERS, strict=False))
        self._name = re.compile(f"(?={_any_of(names)}).", re.DOTALL) if names else None
        self._beginnings = {name[:end] for name in names for end in range(1, len(name))}

    def escape(self, value: Any) -> Any:
        """Escape a string, or all strings in a JSON value. Placeholders in the input become U+FFFD.

        Field names are escaped too, because they may come from the client, e.g. in a tool's arguments. The
        beginning of a special token at the end of a field name is not: what follows never completes it.
        """
        if isinstance(value, str):
            return self._escape_text(value)
        if isinstance(value, Mapping):
            return {self._escape_names(key): self.escape(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape(inner) for inner in value]
        return value

    def unescaping_backend(self, backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
        """Return a copy of `backend` that replaces placeholders by the original characters.

        Logs a warning with the special tokens that cannot be escaped, because their token string is also an
        ordinary entry of the vocabulary.
        """
        state = json.loads(backend.to_str())
        for token in state["added_tokens"]:
            if token["special"]:
                token["normalized"] = False  # found before the normaliser restores the characters
        own = [] if state["normalizer"] is None else [state["normalizer"]]
        restore = [
            {"type": "Replace", "pattern": {"String": placeholder}, "content": char}
            for char, placeholder in self._placeholders.items()
        ]
        state["normalizer"] = {"type": "Sequence", "normalizers": [*restore, *own]}
        unescaping = tokenizers.Tokenizer.from_str(json.dumps(state))
        names = [name for name in self._tokens.values() if self._is_encoded_by(unescaping, name)]
        if names:
            logger.warning("these special tokens cannot be escaped in message contents: %s", names)
        return unescaping

    def _is_encoded_by(self, backend: tokenizers.Tokenizer, name: str) -> bool:
        token_ids = backend.encode(self._escape_text(name), add_special_tokens=False).ids
        return not self._tokens.keys().isdisjoint(token_ids)

    def _escape_text(self, text: str) -> str:
        return self._escape_end(self._escape_names(text))

    def _escape_names(self, text: str) -> str:
        for placeholder in self._placeholders.values():
            text = text.replace(placeholder, REPLACEMENT)
        if self._name is None:
            return text
        return self._name.sub(lambda match: self._placeholders[match[0]], text)

    def _escape_end(self, text: str) -> str:
        """Escape an incomplete special token at the end, which text after the content could complete."""
        end = len(text.rstrip())
        for start in range(max(end - self._longest, 0), end):
            if text[start:end] in self._beginnings:
                text = text[:start] + self._placeholders[text[start]] + text[start + 1 :]
        return text


def _any_of(names: Iterable[str]) -> str:
    """Return a regular expression that matches any of the names, built as a prefix tree."""
    rests: dict[str, list[str]] = {}
    for name in names:
        if not name:
            return ""  # matching the shortest name is enough
        rests.setdefault(name[0], []).append(name[1:])
    return "(?:" + "|".join(re.escape(char) + _any_of(rest) for char, rest in rests.items()) + ")"
