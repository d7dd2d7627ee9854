"""Reads a user's turns at a terminal, with line editing, and appends them to a history file."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import platformdirs
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from shortfin_apps.llm.lone_surrogates import encodable

OWNER_ONLY = 0o600


def history_file() -> Path:
    """Return the history file's path in XDG_STATE_HOME, by default ~/.local/state."""
    return platformdirs.user_state_path("shortfin-llm") / "chat_history"


def open_history(file: Path, say: Callable[[str], None]) -> History:
    """Open the history file and make it readable only by its owner.

    If that fails, call `say` with the reason and keep the history in memory.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, OWNER_ONLY)
        try:
            _check_own(descriptor)
            os.fchmod(descriptor, OWNER_ONLY)
        finally:
            os.close(descriptor)
    except OSError as error:
        say(f"(what you type is not kept for the next time: cannot write {file}: {error.strerror})")
        return InMemoryHistory()
    return _KeptHistory(file, say)


def _check_own(descriptor: int) -> None:
    """Raise OSError unless the open file is a regular file of this user: its path may have been a link."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
        raise OSError(errno.EPERM, "it is not a file of this user")


class _KeptHistory(FileHistory):
    """A history file. The first error when writing is reported to `say`; then nothing more is written."""

    def __init__(self, file: Path, say: Callable[[str], None]) -> None:
        super().__init__(str(file))
        self._say = say
        self._fails = False

    def store_string(self, string: str) -> None:
        if self._fails:
            return
        try:
            super().store_string(encodable(string))
        except OSError as error:
            self._fails = True
            self._say(f"(what you type is not kept any more: cannot write the history: {error.strerror})")


class Prompt:
    """Reads turns, which may have several lines. Tab completes `commands`.

    Enter sends; Alt-Enter or Ctrl-J starts a new line. Bracketed paste makes pasted text one turn, even if it
    has several lines.
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
