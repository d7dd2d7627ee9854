from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.terminal.control import visible


@given(st.text())
def test_nothing_but_line_ends_and_tabs_controls_a_terminal(text: str) -> None:
    shown = visible(text)
    assert len(shown) == len(text)
    assert not [c for c in shown if unicodedata.category(c) == "Cc" and c not in "\n\t\r"]


def test_sequences_are_pictured() -> None:
    assert visible("\x1b[2Jhi\x07\x9b\u202e\n") == "␛[2Jhi␇\ufffd\ufffd\n"
