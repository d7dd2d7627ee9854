"""Renders streamed Markdown: complete blocks are printed permanently, only the last one is redrawn."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment

from shortfin_apps.llm.console import visible

FRAME_S = 0.08  # delay between the arrival of text and its drawing
DRAWING_SHARE = 0.2  # maximum share of time spent drawing, as a long block is slow to draw

# HTML is shown as text, not left out. References are off, as a definition would change earlier blocks.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable("reference")


class AnswerMarkdown(Markdown):
    """Markdown of a model, with link addresses visible.

    `spaced`: the text before it requires a blank line in between.
    """

    def __init__(self, markup: str, spaced: bool = False) -> None:
        super().__init__("", code_theme="ansi_dark", hyperlinks=False)
        self.markup = markup
        # An invisible element, after which Rich leaves a blank line as after others.
        before = [Token("html_block", "", 0)] if spaced else []
        self.parsed = [*before, *_PARSER.parse(markup)]

    @property
    def wants_space(self) -> bool:
        """Whether a blank line separates it from the next block; rules add their own."""
        return bool(self.parsed) and self.parsed[-1].type != "hr"


class OpenText:
    """Growing text, split into top-level blocks that can no longer change, and the remainder."""

    def __init__(self) -> None:
        self._text = ""
        self._held = ""  # a carriage return, until the next character is known

    @property
    def rest(self) -> str:
        return self._text

    def add(self, text: str) -> None:
        text = self._held + text
        self._held = "\r" if text.endswith("\r") else ""
        self._text += text.removesuffix("\r").replace("\r\n", "\n").replace("\r", "\n")

    def closed(self) -> list[str]:
        """Remove complete blocks from the text and return them."""
        lines = self._text.split("\n")
        # A growing line may still become another kind of block, unless it starts with a letter.
        settled = lines if lines[-1][:1].isalpha() else [*lines[:-1], ""]
        starts = list(_starts("\n".join(settled)))
        blocks = ["\n".join(lines[a:b]) for a, b in itertools.pairwise(starts)]
        if blocks:
            self._text = "\n".join(lines[starts[-1] :])
        return blocks


def _starts(text: str) -> Iterator[int]:
    """Yield the first line of each top-level block."""
    for token in _PARSER.parse(text):
        if token.level == 0 and token.nesting >= 0 and token.map is not None:
            yield token.map[0]


class Timer(Protocol):
    """Return value of an event loop's `call_later`."""

    def cancel(self) -> None: ...


Later = Callable[[float, Callable[[], None]], Timer]


class StreamedMarkdown:
    """Writes one text to a terminal, which may be resized.

    `later` calls back after a number of seconds, like an event loop's `call_later`.
    """

    def __init__(
        self, console: Console, later: Later, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._console = console
        self._later = later
        self._clock = clock
        self._open = OpenText()
        self._timer: Timer | None = None
        self._pause_s = FRAME_S
        self._spaced = False  # whether the last printed block requires a blank line after it
        self._live = Live(
            Group(),
            console=console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="visible",
        )

    def write(self, text: str) -> None:
        self._open.add(visible(text))
        if self._timer is None:
            self._timer = self._later(self._pause_s, self._draw)

    def finish(self) -> None:
        """Print the remainder permanently. The writer cannot be used afterwards."""
        if self._timer is not None:
            self._timer.cancel()
        self._open.add("\n")
        blocks = self._open.closed()
        self._live.update(Group())
        try:
            self._console.print(*self._rendered([*blocks, self._open.rest]))
        finally:
            self._live.stop()  # also shows the cursor

    def _draw(self) -> None:
        started = self._clock()
        self._timer = None
        self._live.start()
        blocks = self._rendered(self._open.closed())
        self._live.update(_Bottom(AnswerMarkdown(self._open.rest, self._spaced)))
        if blocks:
            self._console.print(*blocks)  # also draws the live part
        else:
            self._live.refresh()
        self._pause_s = max(FRAME_S, (self._clock() - started) / DRAWING_SHARE)

    def _rendered(self, blocks: list[str]) -> list[AnswerMarkdown]:
        rendered = []
        for block in blocks:
            rendered.append(AnswerMarkdown(block, self._spaced))
            self._spaced = rendered[-1].wants_space
        return rendered


class _Bottom:
    """The last lines of a renderable that fit on a terminal, leaving one line free."""

    def __init__(self, whole: RenderableType) -> None:
        self._whole = whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._whole, options.update(height=None), pad=False)
        for line in lines[-max(1, console.height - 1) :]:
            yield from line
            yield Segment.line()
