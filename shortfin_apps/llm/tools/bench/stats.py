"""Statistics over measured requests. Pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from shortfin_apps.llm.tools.bench.histogram import Bin, counted


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request as seen by the client. Times are `perf_counter` seconds.

    `chunks_s` are the arrival times of events with text. A chunk may contain several tokens, so tokens are
    counted by the server's `usage`. A request with an `error` counts only as an error.
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
        """Time to first token."""
        return self.chunks_s[0] - self.sent_s if self.chunks_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first."""
        if not self.chunks_s or self.output_tokens < 2:
            return None
        return (self.ended_s - self.chunks_s[0]) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: the gaps between chunks, one per chunk however many tokens it has."""
        return [after - before for before, after in zip(self.chunks_s, self.chunks_s[1:], strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of one pass, times in ms. None for an undefined figure, such as TPOT of a single token."""

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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


HIGHER_IS_BETTER = ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s")
LOWER_IS_BETTER = tuple(
    f"{figure}_ms_{point}" for figure in ("ttft", "itl", "tpot", "latency") for point in ("p50", "p99")
)
FIGURES = HIGHER_IS_BETTER + LOWER_IS_BETTER


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The percentile by linear interpolation (numpy's default); None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summarise(records: Sequence[RequestRecord], client_cpu_s: float = 0.0) -> Summary:
    """The figures of one pass, from sending its first request to the end of its last."""
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
    """Return the median of each figure over the repeats in which it exists."""
    return {name: _median(s[name] for s in summaries) for name in FIGURES}


def paired_ratios(
    figures: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[float, float, float] | None]:
    """Return the ratios `figures / baseline` per repeat: their median, minimum and maximum, by figure.

    The n-th repeats of both ran one after the other, so machine drift largely cancels.
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
