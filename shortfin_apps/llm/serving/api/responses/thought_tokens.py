"""Counts the tokens of thoughts from their text, for the separate count in OpenAI's usage."""

from __future__ import annotations

from shortfin_apps.llm.serving.text.tokenizer import LONG_TEXT, Tokenizer


class ThoughtTokens:
    """Tokenises a model's thoughts in pieces of LONG_TEXT characters.

    The number is therefore the same for complete and streamed answers. It may differ slightly from the number
    of generated tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rest = ""
        self._num_counted = 0

    def push(self, text: str) -> None:
        """Append text; takes a few milliseconds per LONG_TEXT characters."""
        self._rest += text
        while len(self._rest) >= LONG_TEXT:
            self._num_counted += self._count(self._rest[:LONG_TEXT])
            self._rest = self._rest[LONG_TEXT:]

    @property
    def num_tokens(self) -> int:
        return self._num_counted + (self._count(self._rest) if self._rest else 0)

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))
