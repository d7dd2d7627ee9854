"""A progress bar on stderr for answered prompts or lines of a batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shortfin_apps.llm.console import PlainConsole

OnAnswer = Callable[[int], None]  # called for each answer, with its number of tokens


@contextmanager
def answer_progress(
    total: int,
    shown: bool | None = None,
    *,
    done: int = 0,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[OnAnswer]:
    """Show a progress bar during the context; yield a function to call with each answer's number of tokens.

    `done` of the `total` answers exist already. By default the bar is shown if stderr is a terminal and more
    than one answer is missing; `shown` overrides this.
    """
    console = console or PlainConsole(stderr=True)
    is_shown = console.is_terminal and total - done > 1 if shown is None else shown
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    begun_s, num_tokens = clock(), 0
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as bar:
        task = bar.add_task("", total=total, completed=done, rate="")

        def on_answer(tokens: int) -> None:
            nonlocal num_tokens
            num_tokens += tokens
            bar.update(task, advance=1, rate=f"{num_tokens / max(clock() - begun_s, 1e-3):,.0f} tok/s")

        yield on_answer
