from __future__ import annotations

import io

import pytest
from rich.console import Console

from shortfin_apps.llm.builder.progress import BuildProgress, PlainProgress, RichProgress, default_progress


def run(progress: BuildProgress) -> None:
    with progress.stage("weights", 10) as stage:
        stage.say("269 MB of bf16")
        stage.advance(10)
    progress.note("up to date")


def test_lines_when_not_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = default_progress()
    assert isinstance(progress, PlainProgress)
    run(progress)
    assert capsys.readouterr().err == "weights\nweights: 269 MB of bf16\nup to date\n"


def test_a_stage_that_begins_with_a_text_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with PlainProgress().stage("verify", 10, "a model"):
        pass
    assert capsys.readouterr().err == "verify: a model\n"


def test_bars_on_a_terminal() -> None:
    screen = io.StringIO()
    run(RichProgress(Console(file=screen, force_terminal=True, width=80)))
    for text in ("weights", "269 MB of bf16", "up to date"):
        assert text in screen.getvalue()
