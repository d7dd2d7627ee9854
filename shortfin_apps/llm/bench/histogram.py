"""Histograms of times: counted on a grid of powers of ten, and drawn with a bar for each range."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

BINS_PER_DECADE = 20  # a bin's end is 1.12 times its beginning
SHORTEST_MS = 1e-3  # shorter times count as this
ROWS = 10
LEAST_BAR = 8  # columns

Bin = tuple[float, float, int]
"""The times that it begins with and ends before, in ms, and how many there are."""


def counted(times_ms: Iterable[float]) -> list[Bin]:
    """The bins that are not empty, shortest times first."""
    return _bins(Counter(_index(time_ms) for time_ms in times_ms), 1)


def _index(time_ms: float) -> int:
    # The ends of a bin are powers that were rounded: a beginning must be in its own bin.
    return math.floor(math.log10(max(time_ms, SHORTEST_MS)) * BINS_PER_DECADE + 1e-9)


def _bins(counts: Counter[int], width: int) -> list[Bin]:
    """Bins of a `width` on the grid, from the number of times by each one's first index."""
    return [
        (10 ** (first / BINS_PER_DECADE), 10 ** ((first + width) / BINS_PER_DECADE), count)
        for first, count in sorted(counts.items())
    ]


def merged(bins: Iterable[Sequence[float]], rows: int = ROWS) -> list[Bin]:
    """The bins of all of these, in at most so many ranges of equal ratio, empty ones among them."""
    counts: Counter[int] = Counter()
    for start_ms, _, count in bins:
        counts[_index(start_ms)] += int(count)
    if not counts:
        return []
    first, last = min(counts), max(counts)
    width = math.ceil((last - first + 1) / rows)
    wide = Counter(dict.fromkeys(range(first, last + 1, width), 0))
    for index, count in counts.items():
        wide[first + (index - first) // width * width] += count
    return _bins(wide, width)


class Histogram:
    """Bars as wide as there is room, with the range of times before each and the number of times behind.

    Where the output cannot have other characters, the bars are of `#`.
    """

    def __init__(self, title: str, bins: Iterable[Sequence[float]]) -> None:
        self._title = title
        self._bins = merged(bins)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        total = sum(count for _, _, count in self._bins)
        yield Text(f"{self._title} in ms, {total:,} times", style="bold", no_wrap=True, overflow="ellipsis")
        if not self._bins:
            return
        ranges = _ranges(self._bins)
        largest = max(count for _, _, count in self._bins)
        taken = len(ranges[0]) + len(f"{largest:,}") + 2
        room = max(LEAST_BAR, options.max_width - taken)
        for label, (_, _, count) in zip(ranges, self._bins, strict=True):
            drawn = bar(count / largest, room, ascii_only=options.ascii_only)
            yield Text(f"{label} {drawn} {count:,}", no_wrap=True, overflow="crop")


def _ranges(bins: Sequence[Bin]) -> list[str]:
    """Labels of the same width, each time with three digits."""
    ends = [(_three_digits(start), _three_digits(end)) for start, end, _ in bins]
    width = max(len(time) for pair in ends for time in pair)
    return [f"{start:>{width}} - {end:>{width}}" for start, end in ends]


def _three_digits(time_ms: float) -> str:
    return f"{time_ms:,.{max(0, 2 - math.floor(math.log10(time_ms) + 1e-9))}f}"


def bar(share: float, room: int, *, ascii_only: bool) -> str:
    """A bar of this share of the room, and of an eighth of a column (else of one) if the share is not 0."""
    if share <= 0:
        return ""
    if ascii_only:
        return "#" * max(1, round(share * room))
    eighths = max(1, round(share * room * 8))
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def side_by_side(histograms: Sequence[Histogram]) -> Table:
    """Histograms beside each other, each with as much room as the others."""
    grid = Table.grid(padding=(0, 3), expand=True)
    for _ in histograms:
        grid.add_column(ratio=1)
    grid.add_row(*histograms)
    return grid
