"""What a terminal shows: a command in a pseudo-terminal, and the text of its screen."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyte

PATIENCE_S = 30.0  # generous: it takes a second


def screen_text(written: str, width: int, height: int) -> list[str]:
    """All lines of a terminal after this was written, scrolled ones first, without spaces at their ends."""
    screen = pyte.HistoryScreen(width, height, history=100_000, ratio=1)
    screen.set_mode(
        pyte.modes.LNM
    )  # a line feed goes to the first column, as the driver of a terminal has it
    pyte.Stream(screen).feed(written)
    lines = ["".join(line[column].data for column in range(width)) for line in screen.history.top]
    return "\n".join(line.rstrip() for line in [*lines, *screen.display]).rstrip("\n").split("\n")


class Terminal:
    """The user's side of a pseudo-terminal."""

    def __init__(self, descriptor: int, columns: int, rows: int) -> None:
        self._descriptor = descriptor
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._poll = select.poll()  # unlike `select`, it takes descriptors above 1023
        self._poll.register(descriptor, select.POLLIN)

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def type(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        """Also tells the program, as the driver does."""
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._screen.resize(rows, columns)

    def wait(self, wanted: str | Callable[[str], bool]) -> str:
        """Reads until the screen has this text, or fits; returns the screen."""
        fits = wanted if callable(wanted) else lambda text: wanted in text
        while not fits(self.text):
            assert self._poll.poll(PATIENCE_S * 1000), f"no {wanted!r} in {PATIENCE_S} s:\n{self.text}"
            try:
                self._stream.feed(os.read(self._descriptor, 65536))
            except OSError:  # the other end is closed
                raise AssertionError(f"it ended without {wanted!r}:\n{self.text}") from None
        return self.text


@contextmanager
def running(
    *argv: str, columns: int = 80, rows: int = 24
) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    """A command of `shortfin-llm` in a terminal, which is its controlling one."""
    user_end, its_end = pty.openpty()
    terminal = Terminal(user_end, columns, rows)
    terminal.resize(columns, rows)
    # These would tell a size that does not change; pytest's processes have them.
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-c", _IN_TERMINAL, *argv],
        stdin=its_end,
        stdout=its_end,
        stderr=its_end,
        env={**inherited, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
        start_new_session=True,
    )
    os.close(its_end)
    try:
        yield terminal, process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE_S)
        os.close(user_end)


# With a controlling terminal, Ctrl-C and changes of its size are signals.
_IN_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from shortfin_apps.llm.cli import main
sys.exit(main())
"""
