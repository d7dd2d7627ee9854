"""Renders streamed Markdown: prints complete blocks once, and redraws only the last, growing block."""

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

FRAME_S = 0.08  # minimum delay before text that has arrived is drawn
DRAWING_SHARE = 0.2  # maximum share of time spent on drawing: long blocks take long to draw

# `html: False` shows HTML as text. References are off: a later definition would change earlier blocks.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable("reference")


class AnswerMarkdown(Markdown):
    """A model's Markdown, as a rich renderable that shows link addresses.

    `spaced`: whether a blank line must precede this Markdown, because of the block printed before.
    """

    def __init__(self, markup: str, spaced: bool = False) -> None:
        super().__init__("", code_theme="ansi_dark", hyperlinks=False)
        self.markup = markup
        # Rich puts a blank line after this empty element, as after any other.
        before = [Token("html_block", "", 0)] if spaced else []
        self.parsed = [*before, *_PARSER.parse(markup)]

    @property
    def wants_space(self) -> bool:
        """Whether a blank line must follow this Markdown. Rich adds one after a horizontal rule by itself."""
        return bool(self.parsed) and self.parsed[-1].type != "hr"


class OpenText:
    """Growing Markdown text. Its leading top-level blocks can be removed once they can no longer change."""

    def __init__(self) -> None:
        self._text = ""
        self._held = ""  # a carriage return at the end of the text, which a line feed may follow

    @property
    def rest(self) -> str:
        return self._text

    def add(self, text: str) -> None:
        text = self._held + text
        self._held = "\r" if text.endswith("\r") else ""
        self._text += text.removesuffix("\r").replace("\r\n", "\n").replace("\r", "\n")

    def closed(self) -> list[str]:
        """Remove the blocks that can no longer change from the text and return them."""
        lines = self._text.split("\n")
        # An unfinished last line that does not start with a letter may still become another kind of block.
        settled = lines if lines[-1][:1].isalpha() else [*lines[:-1], ""]
        starts = list(_starts("\n".join(settled)))
        blocks = ["\n".join(lines[a:b]) for a, b in itertools.pairwise(starts)]
        if blocks:
            self._text = "\n".join(lines[starts[-1] :])
        return blocks


def _starts(text: str) -> Iterator[int]:
    """Yield the number of each top-level block's first line."""
    for token in _PARSER.parse(text):
        if token.level == 0 and token.nesting >= 0 and token.map is not None:
            yield token.map[0]


class Timer(Protocol):
    """The handle that an event loop's `call_later` returns."""

    def cancel(self) -> None: ...


Later = Callable[[float, Callable[[], None]], Timer]


class StreamedMarkdown:
    """Writes one Markdown text to a terminal while it grows. The terminal may be resized meanwhile.

    `later` must behave like an event loop's `call_later`.
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
        """Print the rest of the text for good. Callers must not use the writer afterwards."""
        if self._timer is not None:
            self._timer.cancel()
        self._open.add("\n")
        blocks = self._open.closed()
        self._live.update(Group())
        try:
            self._console.print(*self._rendered([*blocks, self._open.rest]))
        finally:
            self._live.stop()  # also shows the cursor again

    def _draw(self) -> None:
        started = self._clock()
        self._timer = None
        self._live.start()
        blocks = self._rendered(self._open.closed())
        self._live.update(_Bottom(AnswerMarkdown(self._open.rest, self._spaced)))
        if blocks:
            self._console.print(*blocks)  # also redraws the live block below
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
    """Renders the last lines of `whole`, at most as many as the terminal has minus one."""

    def __init__(self, whole: RenderableType) -> None:
        self._whole = whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._whole, options.update(height=None), pad=False)
        for line in lines[-max(1, console.height - 1) :]:
            yield from line
            yield Segment.line()
