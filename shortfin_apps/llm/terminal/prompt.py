"""Reads turns typed at a terminal, with line editing and history."""

from __future__ import annotations

from prompt_toolkit import PromptSession


class Prompt:
    """The input line. Pasted text is one turn, even with several lines, thanks to bracketed paste."""

    def __init__(self) -> None:
        self._session: PromptSession[str] = PromptSession("> ")

    def read(self) -> str:
        """Raises EOFError for Ctrl-D and KeyboardInterrupt for Ctrl-C."""
        return self._session.prompt()
