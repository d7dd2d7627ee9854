"""The outcome of a check of a qualification: its status, and the fault that it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

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
    """The result of a check that passed: a line of text, and measurements."""

    text: str
    figures: Figures = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a check, with the seconds it took."""

    name: str
    status: Status
    text: str
    seconds: float
    fault: Fault | None = None
    figures: Figures = field(default_factory=dict)
