from __future__ import annotations

import itertools
import math
from io import StringIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shortfin_apps.llm.tools.bench.stats import (
    FIGURES,
    ROWS,
    SHORTEST_MS,
    Histogram,
    RequestRecord,
    bar,
    counted,
    median_figures,
    merged,
    paired_ratios,
    percentile,
    summarise,
)

LISTS_OF_TIMES = st.lists(st.floats(0, 1e7), max_size=50)


def drawn(histogram: Histogram, width: int, encoding: str = "utf-8") -> list[str]:
    out = StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    options = console.options.update(width=width)
    options.encoding = encoding
    console.print(*[segment.text for segment in console.render(histogram, options)], sep="", end="")
    return out.getvalue().splitlines()


@given(LISTS_OF_TIMES)
def test_every_time_is_in_its_bin(times: list[float]) -> None:
    bins = counted(times)
    assert sum(count for _, _, count in bins) == len(times)
    for start, end, count in bins:
        inside = [t for t in times if start * (1 - 1e-8) <= max(t, SHORTEST_MS) < end * (1 + 1e-8)]
        assert len(inside) >= count > 0


@given(LISTS_OF_TIMES, LISTS_OF_TIMES, st.integers(1, 12))
def test_repeats_add_up_in_few_ranges_without_gaps(some: list[float], others: list[float], rows: int) -> None:
    bins = merged([*counted(some), *counted(others)], rows)
    assert bins == merged(counted([*some, *others]), rows)
    assert len(bins) <= rows
    assert sum(count for _, _, count in bins) == len(some) + len(others)
    assert all(a[1] == pytest.approx(b[0]) for a, b in itertools.pairwise(bins))


def test_bins_survive_json() -> None:
    assert merged([[1.0, 1.12, 3], [1.0, 1.12, 2]]) == merged(counted([1.0] * 5))


def test_bars_have_ranges_with_units_and_counts() -> None:
    lines = drawn(Histogram("TTFT of W1 on it", counted([10.0] * 4 + [11.5] * 2)), 40)
    assert lines == [
        "TTFT of W1 on it in ms, 6 times",
        f"10.0 - 11.2 {'█' * 26} 4",
        f"11.2 - 12.6 {'█' * 13} 2",
    ]


def test_bars_are_ascii_where_nothing_else_can_be_written() -> None:
    lines = drawn(Histogram("ITL", counted([10.0, 10.0, 200.0])), 50, "ascii")
    assert len(lines) - 1 <= ROWS
    assert all(line.isascii() for line in lines)
    assert "####" in lines[1]


@pytest.mark.parametrize("width", [10, 30, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = drawn(Histogram("TTFT of a long name", counted([0.01, 1.0, 50.0, 9000.0])), width)
    assert len(lines) == 1 + len(merged(counted([0.01, 1.0, 50.0, 9000.0])))
    assert all(len(line) <= width for line in lines)


def test_without_times_there_is_only_the_title() -> None:
    assert drawn(Histogram("ITL", []), 40) == ["ITL in ms, 0 times"]


def test_a_bar_shows_eighths_and_that_there_is_something() -> None:
    assert bar(0.5, 3, ascii_only=False) == "█▌"
    assert bar(1e-9, 3, ascii_only=False) == "▏"
    assert bar(1e-9, 3, ascii_only=True) == "#"
    assert bar(0.0, 3, ascii_only=True) == ""


TIMES = st.floats(0, 1e4)


def record(
    sent_s: float, *chunks_s: float, output_tokens: int = 0, error: str | None = None
) -> RequestRecord:
    return RequestRecord(
        sent_s=sent_s,
        ended_s=chunks_s[-1] if chunks_s else sent_s,
        chunks_s=chunks_s,
        prompt_tokens=10,
        output_tokens=output_tokens or len(chunks_s),
        asked_output_tokens=4,
        error=error,
    )


@given(st.lists(TIMES, min_size=1), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    found = percentile(values, percent)
    assert found is not None
    assert math.isclose(found, np.percentile(values, percent), rel_tol=1e-9, abs_tol=1e-9)


def test_the_percentile_of_nothing_is_none() -> None:
    assert percentile([], 50) is None


@st.composite
def records(draw: st.DrawFn) -> RequestRecord:
    sent_s = draw(TIMES)
    gaps = draw(st.lists(st.floats(0.001, 10), min_size=1, max_size=8))
    chunks_s = [float(t) for t in sent_s + np.cumsum(gaps)]
    extra_tokens = draw(st.integers(0, 5))  # some chunks carry several
    failed = draw(st.none() | st.just("broken"))
    return record(sent_s, *chunks_s, output_tokens=len(chunks_s) + extra_tokens, error=failed)


@given(st.lists(records(), min_size=1, max_size=20))
def test_a_summary_agrees_with_numpy(taken: list[RequestRecord]) -> None:
    summary = summarise(taken)
    served = [r for r in taken if r.error is None]
    span_s = max(r.ended_s for r in taken) - min(r.sent_s for r in taken)
    assert summary.errors == len(taken) - len(served)
    assert math.isclose(summary.output_tokens_per_s, sum(r.output_tokens for r in served) / span_s)
    gaps = [gap for r in served for gap in np.diff(r.chunks_s)]
    tpots = [(r.ended_s - r.chunks_s[0]) / (r.output_tokens - 1) for r in served if r.output_tokens > 1]
    for values, p50, p99 in (
        ([r.chunks_s[0] - r.sent_s for r in served], summary.ttft_ms_p50, summary.ttft_ms_p99),
        (gaps, summary.itl_ms_p50, summary.itl_ms_p99),
        (tpots, summary.tpot_ms_p50, summary.tpot_ms_p99),
        ([r.chunks_s[-1] - r.sent_s for r in served], summary.latency_ms_p50, summary.latency_ms_p99),
    ):
        if values:
            assert [p50, p99] == pytest.approx(list(np.percentile(values, [50, 99]) * 1e3), rel=1e-6)
        else:
            assert (p50, p99) == (None, None)


def test_a_pass_lasts_from_the_first_request_to_the_last_answer() -> None:
    summary = summarise([record(1.0, 2.0, 3.0), record(2.0, 4.0, 5.0)], client_cpu_s=1.0)
    assert summary.duration_s == 4.0
    assert summary.requests_per_s == 0.5
    assert summary.output_tokens_per_s == 1.0
    assert summary.total_tokens_per_s == 6.0
    assert summary.client_cpu_share == 0.25


def test_tokens_are_counted_by_usage_and_gaps_by_chunk() -> None:
    several_a_chunk = record(0.0, 1.0, 2.0, 4.0, output_tokens=7)
    assert several_a_chunk.itl_s == [1.0, 2.0]
    assert several_a_chunk.tpot_s == 0.5
    assert several_a_chunk.ttft_s == 1.0


def test_one_token_has_no_time_per_further_token() -> None:
    summary = summarise([record(0.0, 1.0)])
    assert summary.tpot_ms_p50 is None
    assert summary.itl_ms_p99 is None
    assert summary.ttft_ms_p50 == 1000.0


def test_failures_and_short_answers_are_counted() -> None:
    served, short = record(0.0, 1.0, 2.0, 3.0, 4.0), record(0.0, 1.0)
    summary = summarise([served, short, record(0.0, error="full"), record(0.0, error="full")])
    assert (summary.requests, summary.errors, summary.short_answers) == (4, 2, 1)
    assert summary.error_messages == {"full": 2}


def test_nothing_measured_is_zero() -> None:
    assert summarise([]).output_tokens_per_s == 0.0


def test_medians_leave_out_what_does_not_exist() -> None:
    figures: dict[str, float | None] = dict.fromkeys(FIGURES)
    medians = median_figures([figures | {"ttft_ms_p50": value} for value in (3.0, None, 1.0, 2.0)])
    assert medians["ttft_ms_p50"] == 2.0
    assert medians["itl_ms_p50"] is None


def test_ratios_are_taken_repeat_by_repeat() -> None:
    def runs(*values: float | None) -> list[dict[str, float | None]]:
        return [dict.fromkeys(FIGURES, value) for value in values]

    # The machine was half as fast in the second repeat, for both of them.
    assert paired_ratios(runs(20.0, 10.0), runs(10.0, 5.0))["itl_ms_p50"] == (2.0, 2.0, 2.0)
    assert paired_ratios(runs(1.0, 3.0, 2.0), runs(1.0, 1.0, 1.0))["itl_ms_p50"] == (2.0, 1.0, 3.0)
    assert paired_ratios(runs(None, 3.0), runs(1.0, None))["itl_ms_p50"] is None
