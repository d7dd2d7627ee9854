"""Counts the tokens of thoughts, which OpenAI's usage tells apart, from their text."""

from __future__ import annotations

from shortfin_apps.llm.components.text.tokenizer import LONG_TEXT, Tokenizer


class ThoughtTokens:
    """Tokenises what a model thought, a piece of LONG_TEXT characters at a time.

    So the number is the same whole or streamed, and may differ a little from that of the tokens generated.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rest = ""
        self._num_counted = 0

    def push(self, text: str) -> None:
        """Adds the text that follows the last one; takes some milliseconds for each LONG_TEXT characters."""
        self._rest += text
        while len(self._rest) >= LONG_TEXT:
            self._num_counted += self._count(self._rest[:LONG_TEXT])
            self._rest = self._rest[LONG_TEXT:]

    @property
    def num_tokens(self) -> int:
        return self._num_counted + (self._count(self._rest) if self._rest else 0)

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))
