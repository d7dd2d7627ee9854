"""Shows how many entries of a model have been warmed up: by a bar, where there is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from shortfin_apps.llm.plain_console import PlainConsole


@contextmanager
def warm_up_progress(console: Console | None = None) -> Iterator[Callable[[int, int], None]]:
    """Context with what is to be called with the number of entries done and of all.

    The bar goes when the context ends; without a terminal there is none.
    """
    console = console or PlainConsole(stderr=True)
    columns = (TextColumn("warming up"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
