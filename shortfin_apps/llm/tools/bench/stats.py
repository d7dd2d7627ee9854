"""Statistics and histograms of measured requests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

BINS_PER_DECADE = 20  # a bin's end is 1.12 times its start
SHORTEST_MS = 1e-3  # shorter times are counted in this bin
ROWS = 10
LEAST_BAR = 8  # columns

Bin = tuple[float, float, int]
"""Start (inclusive) and end (exclusive) in ms, and the number of measured times in this range."""


def counted(times_ms: Iterable[float]) -> list[Bin]:
    """Count times in logarithmic bins; return the nonempty bins in ascending order."""
    return _bins(Counter(_index(time_ms) for time_ms in times_ms), 1)


def _index(time_ms: float) -> int:
    # A bin's stored start is a rounded power of ten. The 1e-9 makes that start fall into its own bin.
    return math.floor(math.log10(max(time_ms, SHORTEST_MS)) * BINS_PER_DECADE + 1e-9)


def _bins(counts: Counter[int], width: int) -> list[Bin]:
    """Return bins of `width` grid steps in ascending order; `counts` is by index of a bin's first step."""
    return [
        (10 ** (first / BINS_PER_DECADE), 10 ** ((first + width) / BINS_PER_DECADE), count)
        for first, count in sorted(counts.items())
    ]


def merged(bins: Iterable[Sequence[float]], rows: int = ROWS) -> list[Bin]:
    """Merge bins into at most `rows` ranges with a common ratio of end to start, including empty ranges."""
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
    """A rich renderable: one bar per range of times, preceded by the range and followed by its count.

    The longest bar fills the available width. Bars consist of `#` if the console supports only ASCII.
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
    """Return a label of start and end per bin, all of equal width; times have three significant digits."""
    ends = [(_three_digits(start), _three_digits(end)) for start, end, _ in bins]
    width = max(len(time) for pair in ends for time in pair)
    return [f"{start:>{width}} - {end:>{width}}" for start, end in ends]


def _three_digits(time_ms: float) -> str:
    return f"{time_ms:,.{max(0, 2 - math.floor(math.log10(time_ms) + 1e-9))}f}"


def bar(share: float, room: int, *, ascii_only: bool) -> str:
    """Return a bar of `share * room` columns.

    A bar for a share above 0 is at least an eighth of a column wide, or one column in ASCII.
    """
    if share <= 0:
        return ""
    if ascii_only:
        return "#" * max(1, round(share * room))
    eighths = max(1, round(share * room * 8))
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def side_by_side(histograms: Sequence[Histogram]) -> Table:
    """Lay out histograms next to each other, in columns of equal width."""
    grid = Table.grid(padding=(0, 3), expand=True)
    for _ in histograms:
        grid.add_column(ratio=1)
    grid.add_row(*histograms)
    return grid


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request as measured by the client. Times are `perf_counter` seconds.

    `chunks_s` are the arrival times of chunks with text. A chunk may contain several tokens, so token counts
    are taken from the server's `usage`. Tokens and times of a record with an `error` are not counted.
    """

    sent_s: float
    ended_s: float
    chunks_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    asked_output_tokens: int = 0
    error: str | None = None

    @property
    def latency_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None if no chunk arrived."""
        return self.chunks_s[0] - self.sent_s if self.chunks_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for fewer than two tokens."""
        if not self.chunks_s or self.output_tokens < 2:
            return None
        return (self.ended_s - self.chunks_s[0]) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: the time between two chunks, even if a chunk contains several tokens."""
        return [after - before for before, after in zip(self.chunks_s, self.chunks_s[1:], strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of one pass, times in ms. An undefined figure, such as TPOT of a single token, is None."""

    requests: int
    errors: int
    error_messages: Mapping[str, int]
    short_answers: int  # answers with fewer tokens than requested
    duration_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms_p50: float | None
    ttft_ms_p99: float | None
    itl_ms_p50: float | None
    itl_ms_p99: float | None
    tpot_ms_p50: float | None
    tpot_ms_p99: float | None
    latency_ms_p50: float | None
    latency_ms_p99: float | None
    client_cpu_share: float  # of one core, used by the load generator
    ttft_ms_histogram: Sequence[Bin]
    itl_ms_histogram: Sequence[Bin]


HIGHER_IS_BETTER = ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s")
LOWER_IS_BETTER = tuple(
    f"{figure}_ms_{point}" for figure in ("ttft", "itl", "tpot", "latency") for point in ("p50", "p99")
)
FIGURES = HIGHER_IS_BETTER + LOWER_IS_BETTER


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return a percentile by linear interpolation (numpy's default), or None if `values` is empty."""
    if not values:
        return None
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summarise(records: Sequence[RequestRecord], client_cpu_s: float = 0.0) -> Summary:
    """Compute the figures of one pass. Its duration is from the first request sent to the last one ended."""
    served = [record for record in records if record.error is None]
    errors = Counter(record.error for record in records if record.error is not None)
    duration_s = _span_s(records)
    output_tokens = sum(r.output_tokens for r in served)
    prompt_tokens = sum(r.prompt_tokens for r in served)
    return Summary(
        requests=len(records),
        errors=errors.total(),
        error_messages=dict(errors.most_common()),
        short_answers=sum(r.output_tokens < r.asked_output_tokens for r in served),
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(r.cached_tokens for r in served),
        output_tokens=output_tokens,
        requests_per_s=_rate(len(served), duration_s),
        output_tokens_per_s=_rate(output_tokens, duration_s),
        total_tokens_per_s=_rate(prompt_tokens + output_tokens, duration_s),
        client_cpu_share=_rate(client_cpu_s, duration_s),
        ttft_ms_histogram=_histogram(r.ttft_s for r in served),
        itl_ms_histogram=_histogram(gap for r in served for gap in r.itl_s),
        **_points("ttft", (r.ttft_s for r in served)),
        **_points("itl", (gap for r in served for gap in r.itl_s)),
        **_points("tpot", (r.tpot_s for r in served)),
        **_points("latency", (r.latency_s for r in served)),
    )


def median_figures(summaries: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the median of each figure over the repeats where it is not None; None if there are none."""
    return {name: _median(s[name] for s in summaries) for name in FIGURES}


def paired_ratios(
    figures: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[float, float, float] | None]:
    """Return median, minimum and maximum over the repeats of `figures / baseline`, by figure.

    Ratios are computed per repeat: target and baseline ran one after the other in each repeat, so drift of
    the machine's speed largely cancels. A figure that no repeat has in both is None.
    """
    ratios: dict[str, tuple[float, float, float] | None] = {}
    for name in FIGURES:
        pairs = [(new[name], old[name]) for new, old in zip(figures, baseline, strict=False)]
        found = [new / old for new, old in pairs if new is not None and old]
        ratios[name] = (median(found), min(found), max(found)) if found else None
    return ratios


def _points(figure: str, seconds: Iterable[float | None]) -> dict[str, Any]:
    ms = [value * 1e3 for value in seconds if value is not None]
    return {f"{figure}_ms_p50": percentile(ms, 50), f"{figure}_ms_p99": percentile(ms, 99)}


def _histogram(seconds: Iterable[float | None]) -> list[Bin]:
    return counted(value * 1e3 for value in seconds if value is not None)


def _span_s(records: Sequence[RequestRecord]) -> float:
    if not records:
        return 0.0
    return max(r.ended_s for r in records) - min(r.sent_s for r in records)


def _rate(count: float, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return median(found) if found else None
