from __future__ import annotations

import ast
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.markdown import Markdown
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shortfin_apps.llm import console
from shortfin_apps.llm.console import PlainConsole, visible

TEXTS = st.text(st.characters(exclude_categories=())) | st.text("\r\n\x1ba")


@given(TEXTS, st.integers(0, 8))
def test_nothing_but_line_feeds_and_tabs_controls_a_terminal(text: str, cut: int) -> None:
    shown = visible(text)
    assert len(shown) == len(text) - text.count("\r")
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t"]
    assert shown.encode().decode() == shown
    assert visible(text[:cut]) + visible(text[cut:]) == shown


def test_sequences_are_pictured() -> None:
    assert visible("\x1b[2Jhi\x07\x9b\u202e\r!\r\n") == "␛[2Jhi␇\ufffd\ufffd!\n"
    assert visible("\ud800") == "\ufffd"


PACKAGE = Path(console.__file__).parent
HOSTILE = "\x1b[2J\x1b]0;title\x07 \x9b31m [red]x[/red] [/nothing] :warning: \x1b]8;;http://x\x1b\\"


def table() -> Table:
    made = Table(HOSTILE, title=HOSTILE, caption=HOSTILE)
    made.add_row(HOSTILE)
    return made


@pytest.mark.parametrize(
    "renderable",
    [HOSTILE, Text(HOSTILE), table(), Panel(HOSTILE), Markdown(HOSTILE)],
    ids=["string", "text", "table", "panel", "markdown"],
)
def test_no_text_controls_the_terminal(renderable: object, capsys: pytest.CaptureFixture[str]) -> None:
    PlainConsole(width=200).print(renderable, highlight=False)
    shown = capsys.readouterr().out
    assert not [c for c in shown if unicodedata.category(c) == "Cc" and c != "\n"]
    assert "␛[2J" in shown
    assert "[red]x[/red]" in shown
    assert ":warning:" in shown


def test_the_consoles_own_controls_stay(capsys: pytest.CaptureFixture[str]) -> None:
    console = PlainConsole()
    console._force_terminal = True
    console.show_cursor(False)
    assert capsys.readouterr().out == "\x1b[?25l"


def test_every_console_is_plain() -> None:
    others = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}"
        for file in PACKAGE.rglob("*.py")
        if "Console(" in (source := file.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", getattr(node.func, "attr", "")) == "Console"
    ]
    assert others == []
