"""Shows a live table on a terminal; keys pause and quit."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prompt_toolkit.input import Input, create_input
from prompt_toolkit.keys import Keys
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from shortfin_apps.llm.client import ConnectionFailedError, ServerError
from shortfin_apps.llm.console import visible
from shortfin_apps.llm.contract.errors import OverloadedError, UnavailableError
from shortfin_apps.llm.terminal.top.figures import Figures, WatchedServer
from shortfin_apps.llm.terminal.top.table import FiguresTable, Fitted, server_line

AWAY = (ConnectionFailedError, OverloadedError, ServerError, UnavailableError)  # possibly temporary errors
QUIT_KEYS = ("q", "Q", Keys.ControlC, Keys.ControlD)
HEAD_LINES, FOOT_LINES = 2, 2


class LiveTable:
    """Reads a server's figures every `interval_s` seconds and draws them, until a key quits."""

    def __init__(
        self,
        server: WatchedServer,
        console: Console,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._console = console
        self._interval_s = interval_s
        self._clock = clock
        self._figures: Figures | None = None
        self._problem: str | None = None
        self._away_since_s = 0.0
        self._quit = asyncio.Event()
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._live = Live(
            console=console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            get_renderable=self._screen,
        )

    async def watch(self) -> None:
        """Show the table until a key quits. Raises LlmError for permanent errors, such as a wrong API key."""
        reading = asyncio.ensure_future(self._keep_reading())
        quitting = asyncio.ensure_future(self._quit.wait())
        try:
            with self._live, _typed(self._key), _resized(self._live.refresh):
                await asyncio.wait((reading, quitting), return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
        finally:
            reading.cancel()
            quitting.cancel()
            await asyncio.gather(reading, quitting, return_exceptions=True)

    async def _keep_reading(self) -> None:
        while True:
            await self._unpaused.wait()
            await self.read()
            self._live.refresh()
            await asyncio.sleep(self._interval_s)

    async def read(self) -> None:
        """Read the next figures. For a temporary error, keep the last figures and store the error to show."""
        try:
            self._figures = await self._server.read()
            self._problem = None
        except AWAY as error:
            if self._problem is None:
                self._away_since_s = self._clock()
            self._problem = str(error)

    def _key(self, key: str) -> None:
        if key in QUIT_KEYS:
            self._quit.set()
        elif key in ("p", "P"):
            if self._unpaused.is_set():
                self._unpaused.clear()
            else:
                self._unpaused.set()
            self._live.refresh()

    def _screen(self) -> RenderableType:
        head = Text(server_line(self._server.url, self._server.info), no_wrap=True, overflow="ellipsis")
        body: RenderableType = Text("")
        if self._figures is not None:
            body = FiguresTable(self._figures, self._console.height - HEAD_LINES - FOOT_LINES)
        return Fitted(head, Text(""), body, foot=self._foot())

    def _foot(self) -> Text:
        foot = Text(no_wrap=True, overflow="ellipsis")
        if self._problem is not None:
            away_s = self._clock() - self._away_since_s
            foot.append(f"away for {away_s:.0f} s, tried again every {self._interval_s:g} s: ", "bold red")
            foot.append(visible(self._problem) + "\n")
        state = "paused" if not self._unpaused.is_set() else f"every {self._interval_s:g} s"
        foot.append(f"{state}; p pauses and resumes, q quits", "dim")
        return foot


@contextmanager
def _typed(take: Callable[[str], None]) -> Iterator[Input]:
    """Call `take` with each pressed key during the context, in which the terminal does not echo keys."""
    terminal = create_input()

    def ready() -> None:
        for press in terminal.read_keys():
            take(press.key)

    with terminal.raw_mode(), terminal.attach(ready):
        yield terminal


@contextmanager
def _resized(redraw: Callable[[], None]) -> Iterator[None]:
    """Call `redraw` when the terminal's size changes during the context."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGWINCH, redraw)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
