from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.visible import visible

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
