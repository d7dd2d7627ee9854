from __future__ import annotations

import io

import pytest
from rich.console import Console

from shortfin_apps.llm.offline.progress import answer_progress


def shown(total: int, *, terminal: bool, wanted: bool | None = None, done: int = 0) -> str:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=100)
    times = iter([0.0, 2.0, 4.0])
    with answer_progress(total, wanted, done=done, console=console, clock=lambda: next(times)) as told:
        told(10)
        told(30)
    return screen.getvalue()


def test_a_terminal_shows_how_many_are_answered_and_how_fast() -> None:
    text = shown(4, terminal=True, done=1)
    assert "3/4" in text
    assert "10 tok/s" in text


@pytest.mark.parametrize(
    ("total", "terminal", "wanted"), [(4, False, None), (1, True, None), (4, True, False)]
)
def test_otherwise_there_is_no_bar(total: int, terminal: bool, wanted: bool | None) -> None:
    assert "tok/s" not in shown(total, terminal=terminal, wanted=wanted)
