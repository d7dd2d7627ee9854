"""A check of a qualification."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shortfin_apps.llm.tools.qualify.bench import Bench
from shortfin_apps.llm.tools.qualify.outcome import Passed


@dataclass(frozen=True, slots=True)
class Check:
    """A check: `run` returns Passed, or raises Skipped or Failed; any other exception is a failure, too.

    `about` says in a line what passing means. `share` is the check's share of the total time, relative to
    other checks.
    """

    name: str
    about: str
    run: Callable[[Bench], Passed]
    share: float = 1.0
    is_optional: bool = False  # runs only if it is asked for
