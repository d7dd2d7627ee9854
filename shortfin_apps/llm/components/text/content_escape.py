"""Contents of messages in which the names of special tokens are plain text.

A chat template writes special tokens and contents into one text, and a tokenizer cannot tell them apart. So
in contents the first character of such a name is replaced by a stand-in before the template runs, and a
tokenizer of its own reads the result: it finds special tokens first, then puts the characters back, and
splits the rest as it splits any text.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers

from shortfin_apps.llm.errors import ArtifactError

logger = logging.getLogger(__name__)

REPLACEMENT = "\ufffd"  # as for other characters that no text should have
STAND_INS = [chr(point) for point in range(0xFDD0, 0xFDF0)]  # Unicode has these for a program's own use


class ContentEscape:
    """The special tokens of `backend`. Raises ArtifactError for more first characters than stand-ins."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        self._tokens = {i: token.content for i, token in added.items() if token.special}
        names = list(self._tokens.values())
        first = sorted({name[0] for name in names})
        if len(first) > len(STAND_INS):
            raise ArtifactError(
                f"the tokenizer's special tokens begin with {len(first)} different characters, but only"
                f" {len(STAND_INS)} can be escaped; serve it without --no-special-in-content"
            )
        self._stand_ins = dict(zip(first, STAND_INS, strict=False))
        self._name = re.compile(f"(?={_any_of(names)}).", re.DOTALL) if names else None
        self._beginnings = {name[:end] for name in names for end in range(1, len(name))}
        self._longest = max(map(len, names), default=0)

    def escape(self, value: Any) -> Any:
        """A text, or any JSON with the texts in it escaped. Stand-ins that came with it become U+FFFD."""
        if isinstance(value, str):
            return self._escape_text(value)
        if isinstance(value, Mapping):
            return {key: self.escape(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape(inner) for inner in value]
        return value

    def reader(self, backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
        """A copy of `backend` that reads stand-ins as the characters they stand for.

        Logs a warning with the special tokens that it writes even so: where a name is an ordinary piece of
        the vocabulary too, nothing tells the two apart.
        """
        state = json.loads(backend.to_str())
        for token in state["added_tokens"]:
            if token["special"]:
                token["normalized"] = False  # to be looked for while the stand-ins are there
        own = [] if state["normalizer"] is None else [state["normalizer"]]
        put_back = [
            {"type": "Replace", "pattern": {"String": stand_in}, "content": char}
            for char, stand_in in self._stand_ins.items()
        ]
        state["normalizer"] = {"type": "Sequence", "normalizers": [*put_back, *own]}
        reader = tokenizers.Tokenizer.from_str(json.dumps(state))
        names = [name for name in self._tokens.values() if self._is_written_by(reader, name)]
        if names:
            logger.warning("content can still write these special tokens, as text has them: %s", names)
        return reader

    def _is_written_by(self, reader: tokenizers.Tokenizer, name: str) -> bool:
        ids = reader.encode(self._escape_text(name), add_special_tokens=False).ids
        return not self._tokens.keys().isdisjoint(ids)

    def _escape_text(self, text: str) -> str:
        for stand_in in self._stand_ins.values():
            text = text.replace(stand_in, REPLACEMENT)
        if self._name is None:
            return text
        return self._escape_end(self._name.sub(lambda match: self._stand_ins[match[0]], text))

    def _escape_end(self, text: str) -> str:
        """No name is begun at the end, either, that a text behind it might complete."""
        end = len(text.rstrip())
        for start in range(max(end - self._longest, 0), end):
            if text[start:end] in self._beginnings:
                text = text[:start] + self._stand_ins[text[start]] + text[start + 1 :]
        return text


def _any_of(names: Iterable[str]) -> str:
    """A pattern for the names, in which those that begin alike are tried together."""
    rests: dict[str, list[str]] = {}
    for name in names:
        if not name:
            return ""  # a shorter name ends here
        rests.setdefault(name[0], []).append(name[1:])
    return "(?:" + "|".join(re.escape(char) + _any_of(rest) for char, rest in rests.items()) + ")"
