from __future__ import annotations

import itertools
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shortfin_apps.llm.tools.bench.histogram import ROWS, SHORTEST_MS, Histogram, bar, counted, merged

TIMES = st.lists(st.floats(0, 1e7), max_size=50)


def drawn(histogram: Histogram, width: int, encoding: str = "utf-8") -> list[str]:
    out = StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    options = console.options.update(width=width)
    options.encoding = encoding
    console.print(*[segment.text for segment in console.render(histogram, options)], sep="", end="")
    return out.getvalue().splitlines()


@given(TIMES)
def test_every_time_is_in_its_bin(times: list[float]) -> None:
    bins = counted(times)
    assert sum(count for _, _, count in bins) == len(times)
    for start, end, count in bins:
        inside = [t for t in times if start * (1 - 1e-8) <= max(t, SHORTEST_MS) < end * (1 + 1e-8)]
        assert len(inside) >= count > 0


@given(TIMES, TIMES, st.integers(1, 12))
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
