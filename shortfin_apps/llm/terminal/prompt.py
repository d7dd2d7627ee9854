"""Turns that a person types at a terminal, with editing and a history of them."""

from __future__ import annotations

from prompt_toolkit import PromptSession


class Prompt:
    """Text that is pasted is one turn, whatever lines it has: terminals mark it (bracketed paste)."""

    def __init__(self) -> None:
        self._session: PromptSession[str] = PromptSession("> ")

    def read(self) -> str:
        """Raises EOFError for Ctrl-D and KeyboardInterrupt for Ctrl-C."""
        return self._session.prompt()
