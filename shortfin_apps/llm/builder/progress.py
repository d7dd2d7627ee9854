"""Progress of a build: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from shortfin_apps.llm.console import PlainConsole, visible


class Stage(Protocol):
    """A running stage of a build."""

    def advance(self, amount: int) -> None:
        """Report that `amount` more of the stage's total is done."""
        ...

    def say(self, text: str) -> None:
        """Show the current activity."""
        ...


class BuildProgress(Protocol):
    """A receiver of a build's stages, in order."""

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Stage]:
        """Run a stage as a context; `total` is its size, or None if unknown."""
        ...

    def note(self, text: str) -> None:
        """Print a line that stays on the screen."""
        ...


class PlainProgress:
    """Progress as lines on stderr: one per stage and one per change of text."""

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Stage]:
        self.note(name)
        yield _PlainStage(self, name)

    def note(self, text: str) -> None:
        print(visible(text), file=sys.stderr, flush=True)


class QuietProgress(PlainProgress):
    """Progress that prints nothing."""

    def note(self, text: str) -> None:
        pass


class _PlainStage:
    def __init__(self, progress: PlainProgress, name: str) -> None:
        self._progress = progress
        self._name = name

    def advance(self, amount: int) -> None:
        pass

    def say(self, text: str) -> None:
        self._progress.note(f"{self._name}: {text}")


class RichProgress:
    """Progress as bars on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Stage]:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description:<8}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}", markup=False),
        )
        with Progress(*columns, console=self._console) as bars:
            yield _RichStage(bars, bars.add_task(name, total=total, text=""))

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


class _RichStage:
    def __init__(self, bars: Progress, task: TaskID) -> None:
        self._bars = bars
        self._task = task

    def advance(self, amount: int) -> None:
        self._bars.advance(self._task, amount)

    def say(self, text: str) -> None:
        self._bars.update(self._task, text=text)


def default_progress() -> BuildProgress:
    """Return bars if stderr is a terminal, otherwise lines."""
    console = PlainConsole(stderr=True)
    return RichProgress(console) if console.is_terminal else PlainProgress()
