"""Reads turns typed at a terminal, with line editing and history."""

from __future__ import annotations

from collections.abc import Sequence

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from shortfin_apps.llm.lone_surrogates import encodable


class Prompt:
    """Reads turns, which may have several lines; Tab completes `commands`.

    Enter sends, Alt-Enter or Ctrl-J starts a new line. Pasted text is one turn, even with several lines,
    thanks to bracketed paste.
    """

    def __init__(self, history: History, commands: Sequence[str]) -> None:
        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation="  ",
            key_bindings=_keys(),
            history=history,
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
        )

    def read(self) -> str:
        """Read a turn. Raises EOFError for Ctrl-D and KeyboardInterrupt for Ctrl-C."""
        return encodable(self._session.prompt())


def _keys() -> KeyBindings:
    keys = KeyBindings()
    typing = has_focus(DEFAULT_BUFFER)  # false during a history search

    @keys.add("enter", filter=typing)
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=typing)
    @keys.add("c-j", filter=typing)
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
