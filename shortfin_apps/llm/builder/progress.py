"""Progress of a build: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from shortfin_apps.llm.console import PlainConsole, visible


@dataclass(frozen=True, slots=True)
class Stage:
    """A running stage of a build.

    `advance(amount)` adds `amount` to the completed part of the stage's total; `say(text)` shows the current
    activity.
    """

    advance: Callable[[int], None]
    say: Callable[[str], None]


class BuildProgress(Protocol):
    """A display of a build's stages, which run one after another."""

    @contextmanager
    def stage(self, name: str, total: int | None = None, text: str = "") -> Iterator[Stage]:
        """Run a stage for the duration of the context.

        `total`: the stage's size in the unit of `Stage.advance`; None if unknown. `text`: the first activity
        to show.
        """
        ...

    def note(self, text: str) -> None:
        """Print a line that stays on the screen."""
        ...


class PlainProgress:
    """Progress as lines on stderr: one at the start of each stage, and one per reported activity."""

    @contextmanager
    def stage(self, name: str, total: int | None = None, text: str = "") -> Iterator[Stage]:
        self.note(f"{name}: {text}" if text else name)
        yield Stage(advance=lambda _: None, say=lambda text: self.note(f"{name}: {text}"))

    def note(self, text: str) -> None:
        print(visible(text), file=sys.stderr, flush=True)


class QuietProgress(PlainProgress):
    """Progress that prints nothing."""

    def note(self, text: str) -> None:
        pass


class RichProgress:
    """Progress as bars on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def stage(self, name: str, total: int | None = None, text: str = "") -> Iterator[Stage]:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description:<8}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}", markup=False),
        )
        with Progress(*columns, console=self._console) as bars:
            task = bars.add_task(name, total=total, text=text)
            yield Stage(
                advance=lambda amount: bars.advance(task, amount),
                say=lambda text: bars.update(task, text=text),
            )

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


def default_progress() -> BuildProgress:
    """Return bars if stderr is a terminal, otherwise lines."""
    console = PlainConsole(stderr=True)
    return RichProgress(console) if console.is_terminal else PlainProgress()
