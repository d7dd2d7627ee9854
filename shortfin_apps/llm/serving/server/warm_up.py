"""Shows warm-up progress, as a bar on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from shortfin_apps.llm.console import PlainConsole


@contextmanager
def warm_up_progress(console: Console | None = None) -> Iterator[Callable[[int, int], None]]:
    """Yield a function to call with the number of warmed-up entries and of all entries.

    The bar disappears when the context ends; it is not shown without a terminal.
    """
    console = console or PlainConsole(stderr=True)
    columns = (TextColumn("warming up"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
