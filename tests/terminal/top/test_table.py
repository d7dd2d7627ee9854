from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console, RenderableType
from rich.text import Text

from shortfin_apps.llm.terminal.top.figures import EntryMix, Figures, Pages, figures_of
from shortfin_apps.llm.terminal.top.table import FiguresTable, Fitted, PageBar, server_line
from tests.terminal.top.metered import INFO, MeteredServer


def shown(what: RenderableType, width: int = 80, height: int = 24) -> list[str]:
    out = StringIO()
    Console(file=out, width=width, height=height, color_system=None, _environ={}).print(what)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.fixture
def figures() -> Figures:
    server = MeteredServer()
    before = server.reading()
    server.work(2.0)
    return figures_of(before, server.reading())


def test_all_figures_fit_in_80_columns(figures: Figures) -> None:
    lines = shown(FiguresTable(figures))
    assert [line.split("  ")[0] for line in lines[:8]] == [
        *("tokens/s", "requests", "TTFT", "ITL", "pages", "preemptions", "refused", "engine"),
    ]
    text = "\n".join(lines)
    for part in (
        *("in 200 (25% cached), out 25.0", "3 running, 4 waiting, finished: 4 stop"),
        *(
            "p50 16.7 ms, p99 244 ms",
            "50 used, 20 cached, 30 free",
            "1 queue_full",
            "50% of the time in steps",
        ),
    ):
        assert part in text
    assert lines[-2].split() == ["prefill_bs4", "0.5", "2.0", "150", "0.0", "22%"]


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_no_line_is_wider_than_the_terminal(figures: Figures, width: int) -> None:
    assert all(len(line) <= width for line in shown(FiguresTable(figures), width))


@pytest.mark.parametrize("lines", [8, 11, 12, 14, 40])
def test_entries_that_do_not_fit_are_counted(figures: Figures, lines: int) -> None:
    mixes = tuple(EntryMix(f"entry_{n}", 1.0, 1.0, 1.0, 1.0, 0.0) for n in range(20))
    found = shown(FiguresTable(replace(figures, entries=mixes), lines))
    assert len(found) <= lines
    visible = sum(line.startswith("entry_") for line in found)
    hidden = [line for line in found if line.endswith("more entries")]
    assert hidden == ([f"and {20 - visible} more entries"] if visible < 20 and lines > 10 else [])


def test_what_is_not_known_is_a_dash() -> None:
    nothing = Figures(running=None, waiting=None, pages=None, window_pages=None)
    assert [line.split()[1] for line in shown(FiguresTable(nothing))[2:6]] == ["-"] * 4
    assert "in -, out -" in shown(FiguresTable(nothing))[0]


def test_a_bar_has_the_shares_of_the_pages() -> None:
    (line,) = shown(PageBar(Pages(total=8, used=4, cached=2, free=2)), 33)
    assert line == "████▒▒░░ 4 used, 2 cached, 2 free"


def test_a_bar_of_a_narrow_terminal_is_its_text() -> None:
    assert shown(PageBar(Pages(8, 4, 2, 2)), 26) == ["4 used, 2 cached, 2 free"]


def test_the_server_is_described_as_far_as_it_tells() -> None:
    assert server_line("http://x", INFO) == "tiny at http://x, version 1.2, cpu, default"
    assert server_line("http://x", {}) == "http://x"
    assert server_line("http://x", {"served_model_name": "a\x1b[2J"}) == "a␛[2J at http://x"


@pytest.mark.parametrize("height", [1, 3, 10])
def test_the_foot_stays_at_the_foot(height: int) -> None:
    lines = shown(Fitted(Text("a\nb\nc"), foot=Text("foot")), 20, height)
    assert len(lines) == height
    assert lines[-1] == "foot"
    assert lines[:-1] == ["a", "b", "c", *[""] * 10][: height - 1]


@pytest.mark.parametrize(
    ("total", "used", "cached"),
    [(1, 500_000, 0), (1, 0, 2**64), (9, -5, 1), (9, 9, -9), (9, -(2**64), 2**64)],
)
def test_a_bar_has_its_width_whatever_a_server_says(total: int, used: int, cached: int) -> None:
    bar = PageBar(Pages(total=total, used=used, cached=cached, free=1))
    assert len(bar._bar(10, ascii_only=True)) == 10
