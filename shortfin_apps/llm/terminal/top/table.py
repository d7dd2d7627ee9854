"""Draws a server's figures as a table, for a terminal of any size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from shortfin_apps.llm.console import visible
from shortfin_apps.llm.terminal.top.figures import EntryMix, Figures, Pages

ENTRY_HEADING_LINES = 2
LABEL_WIDTH = len("window pages")
NARROWEST_BAR, WIDEST_BAR = 4, 40  # columns
NONE = "-"


def server_line(url: str, info: Mapping[str, Any]) -> str:
    """Describe the model, the server's address, version and settings, as far as `/server_info` has them."""
    name = info.get("served_model_name")
    parts = [f"{name} at {url}" if name else url]
    if version := info.get("version"):
        parts.append(f"version {version}")
    settings = info.get("server")
    if isinstance(settings, dict):
        parts += [str(settings[key]) for key in ("device", "batch_mode") if settings.get(key)]
    return visible(", ".join(parts))


class FiguresTable:
    """A rich renderable of all figures. With `lines`, it shows only as many entries as fit in these lines."""

    def __init__(self, figures: Figures, lines: int | None = None) -> None:
        self._figures = figures
        self._lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        figures = self._figures
        rows = _rows(figures)
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(style="bold", no_wrap=True, min_width=LABEL_WIDTH)
        grid.add_column(overflow="ellipsis", no_wrap=True, ratio=1)
        for name, value in rows:
            grid.add_row(name, value)
        yield grid
        left = None if self._lines is None else self._lines - len(rows) - ENTRY_HEADING_LINES
        if figures.entries and (left is None or left > 0):
            yield from _entries(figures.entries, left)


def _rows(figures: Figures) -> list[tuple[str, RenderableType]]:
    rows: list[tuple[str, RenderableType]] = [
        ("tokens/s", _tokens(figures)),
        ("requests", _requests(figures)),
        ("TTFT", _latency(figures.ttft_ms_p50, figures.ttft_ms_p99)),
        ("ITL", _latency(figures.itl_ms_p50, figures.itl_ms_p99)),
        ("pages", NONE if figures.pages is None else PageBar(figures.pages)),
    ]
    if figures.window_pages is not None:
        rows.append(("window pages", PageBar(figures.window_pages)))
    preempted = NONE if figures.preemptions is None else str(figures.preemptions)
    rows.append(("preemptions", preempted))
    rows.append(("refused", _by_reason(figures.refused)))
    rows.append(("engine", f"{_percent(figures.busy_share)} of the time in steps"))
    return rows


def _tokens(figures: Figures) -> str:
    cached = "" if figures.cached_share is None else f" ({_percent(figures.cached_share)} cached)"
    return f"in {_number(figures.tokens_in_per_s)}{cached}, out {_number(figures.tokens_out_per_s)}"


def _requests(figures: Figures) -> str:
    running, waiting = (NONE if n is None else str(n) for n in (figures.running, figures.waiting))
    return f"{running} running, {waiting} waiting, finished: {_by_reason(figures.finished)}"


def _by_reason(counts: Mapping[str, int]) -> str:
    if not counts:
        return "0"
    reasons = ", ".join(f"{count} {visible(reason)}" for reason, count in counts.items())
    return reasons if len(counts) == 1 else f"{sum(counts.values())} ({reasons})"


def _latency(p50_ms: float | None, p99_ms: float | None) -> str:
    if p50_ms is None or p99_ms is None:
        return NONE
    return f"p50 {_number(p50_ms)} ms, p99 {_number(p99_ms)} ms"


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:,.{1 if value < 100 else 0}f}"


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{share:.0%}"


class PageBar:
    """A rich renderable of page counts as text and, if there is room, a bar."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        pages = self._pages
        text = f"{pages.used} used, {pages.cached} cached, {pages.free} free"
        width = min(WIDEST_BAR, options.max_width - len(text) - 1)
        if width >= NARROWEST_BAR and pages.total > 0:
            text = f"{self._bar(width, options.ascii_only)} {text}"
        yield Text(text, no_wrap=True, overflow="ellipsis")

    def _bar(self, width: int, ascii_only: bool) -> str:
        pages = self._pages
        used, cached, free = "#+." if ascii_only else "█▒░"
        end_used = _within(width, width * pages.used / pages.total)
        end_cached = max(end_used, _within(width, width * (pages.used + pages.cached) / pages.total))
        return used * end_used + cached * (end_cached - end_used) + free * (width - end_cached)


def _within(width: int, column: float) -> int:
    """Round `column` and clip it to the bar, as a server may report more used pages than exist."""
    return round(max(0, min(width, column)))


def _entries(entries: Sequence[EntryMix], room: int | None) -> RenderResult:
    hidden = 0 if room is None else max(0, len(entries) - room)
    if hidden:
        hidden += 1  # the line that tells how many are hidden takes the place of one
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("entry", no_wrap=True, overflow="ellipsis")
    for heading in ("calls/s", "tasks", "prefill tok/s", "decode tok/s", "padding"):
        table.add_column(heading, justify="right", no_wrap=True, overflow="ellipsis")
    for mix in entries[: len(entries) - hidden]:
        table.add_row(
            visible(mix.entry),
            _number(mix.invocations_per_s),
            _number(mix.tasks),
            _number(mix.prefill_tokens_per_s),
            _number(mix.decode_tokens_per_s),
            _percent(mix.padding_share),
        )
    yield table
    if hidden:
        yield Text(f"and {hidden} more entries", style="dim")


class Fitted:
    """A rich renderable: `parts` clipped to the console's height, above a foot at the bottom."""

    def __init__(self, *parts: RenderableType, foot: RenderableType) -> None:
        self._body = Group(*parts)
        self._foot = foot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbound = options.update(height=None)
        foot = console.render_lines(self._foot, unbound)
        room = max(0, console.height - len(foot))
        lines = console.render_lines(self._body, unbound)[:room]
        lines += [[Segment(" " * options.max_width)]] * (room - len(lines))
        for line in [*lines, *foot]:
            yield from line
            yield Segment.line()
