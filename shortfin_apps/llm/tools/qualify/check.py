"""A check of a qualification, and its outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shortfin_apps.llm.tools.qualify.bench import Bench

Figures = Mapping[str, Any]
"""Measured values by name, which must be JSON values."""


class Status(StrEnum):
    PASSED = "pass"
    FAILED = "fail"
    SKIPPED = "skipped"


class Fault(StrEnum):
    """The kinds of faults that checks can name."""

    WRONG_KERNEL = "wrong kernel result"
    STALE_WEIGHTS = "stale weights"
    STALE_MEMORY = "stale memory"
    MISSING_WAIT = "missing wait"
    SLOW_CLOCK = "slow clock"
    DAMAGED_FILE = "damaged file"
    WRONG_ANSWER = "wrong answer"
    LOST_PAGES = "lost pages"
    EMULATOR = "finding of the emulator"
    HANG = "hang"
    CRASH = "crash"


class Skipped(Exception):
    """The check does not apply here; the text says why, or what it needs."""


class Failed(Exception):
    """The check found a fault. `figures` are the evidence."""

    def __init__(self, fault: Fault | None, text: str, figures: Figures | None = None) -> None:
        super().__init__(text)
        self.fault = fault
        self.figures = figures or {}


@dataclass(frozen=True, slots=True)
class Passed:
    """What a check that passed has to say, with its measurements."""

    text: str
    figures: Figures = field(default_factory=dict)


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


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a check, with the seconds it took."""

    name: str
    status: Status
    text: str
    seconds: float
    fault: Fault | None = None
    figures: Figures = field(default_factory=dict)
