"""Histograms of times: counted in logarithmic bins, drawn as one bar per range."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

BINS_PER_DECADE = 20  # a bin's end is 1.12 times its start
SHORTEST_MS = 1e-3  # shorter times are counted in this bin
ROWS = 10
LEAST_BAR = 8  # columns

Bin = tuple[float, float, int]
"""Start (inclusive) and end (exclusive) in ms, and the number of times."""


def counted(times_ms: Iterable[float]) -> list[Bin]:
    """Count times in bins; return the nonempty ones in ascending order."""
    return _bins(Counter(_index(time_ms) for time_ms in times_ms), 1)


def _index(time_ms: float) -> int:
    # The boundaries of a bin are rounded powers: its start must still fall into the bin.
    return math.floor(math.log10(max(time_ms, SHORTEST_MS)) * BINS_PER_DECADE + 1e-9)


def _bins(counts: Counter[int], width: int) -> list[Bin]:
    """Return bins `width` grid steps wide, from counts by first index."""
    return [
        (10 ** (first / BINS_PER_DECADE), 10 ** ((first + width) / BINS_PER_DECADE), count)
        for first, count in sorted(counts.items())
    ]


def merged(bins: Iterable[Sequence[float]], rows: int = ROWS) -> list[Bin]:
    """Merge bins into at most `rows` ranges of equal ratio, including empty ranges."""
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
    """Bars that fill the available width, each preceded by its range of times and followed by its count.

    The bars consist of `#` if the output supports only ASCII.
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
    """Return labels of equal width, with times of three digits."""
    ends = [(_three_digits(start), _three_digits(end)) for start, end, _ in bins]
    width = max(len(time) for pair in ends for time in pair)
    return [f"{start:>{width}} - {end:>{width}}" for start, end in ends]


def _three_digits(time_ms: float) -> str:
    return f"{time_ms:,.{max(0, 2 - math.floor(math.log10(time_ms) + 1e-9))}f}"


def bar(share: float, room: int, *, ascii_only: bool) -> str:
    """Return a bar of `share` of the room; if not 0, at least an eighth of a column (ASCII: a column)."""
    if share <= 0:
        return ""
    if ascii_only:
        return "#" * max(1, round(share * room))
    eighths = max(1, round(share * room * 8))
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def side_by_side(histograms: Sequence[Histogram]) -> Table:
    """Lay out histograms in columns of equal width."""
    grid = Table.grid(padding=(0, 3), expand=True)
    for _ in histograms:
        grid.add_column(ratio=1)
    grid.add_row(*histograms)
    return grid
