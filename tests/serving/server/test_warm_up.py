"""The bar of entries that have been warmed up."""

from __future__ import annotations

import io

from rich.console import Console

from shortfin_apps.llm.serving.server.warm_up import warm_up_progress


def shown(is_terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=60)
    with warm_up_progress(console) as on_progress:
        for done in range(4):
            on_progress(done, 3)
    return out.getvalue()


def test_a_terminal_shows_how_many_are_done() -> None:
    text = shown(is_terminal=True)
    assert "warming up" in text
    assert "3/3" in text


def test_a_log_stays_free_of_it() -> None:
    assert shown(is_terminal=False).strip() == ""
