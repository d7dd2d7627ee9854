"""The outcome of replaying receipts under a schedule, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table


@dataclass(slots=True)
class Outcome:
    """The outcome of one schedule: `differences` by receipt number, from 1. `skipped`: why it was not run.

    `details` are counts that prove that the schedule did what its name says.
    """

    schedule: str
    num_receipts: int
    differences: dict[int, str] = field(default_factory=dict)
    details: dict[str, int] = field(default_factory=dict)
    skipped: str | None = None

    @property
    def num_same(self) -> int:
        return 0 if self.skipped else self.num_receipts - len(self.differences)

    def add(self, index: int, difference: str | None) -> None:
        """Record the outcome of receipt `index`, counted from 0."""
        if difference is not None:
            self.differences[index + 1] = difference

    def document(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule,
            "receipts": self.num_receipts,
            "same": self.num_same,
            "skipped": self.skipped,
            "differences": [{"receipt": n, "difference": text} for n, text in self.differences.items()],
            **self.details,
        }


def table(outcomes: Sequence[Outcome]) -> Table:
    made = Table("schedule", "same", "result", title="to the bit")
    for outcome in outcomes:
        made.add_row(outcome.schedule, f"{outcome.num_same} of {outcome.num_receipts}", _result(outcome))
    return made


def _result(outcome: Outcome) -> str:
    if outcome.skipped is not None:
        return f"not run: {outcome.skipped}"
    details = ", ".join(f"{name.replace('_', ' ')}: {count}" for name, count in outcome.details.items())
    if not outcome.differences:
        return f"ok ({details})" if details else "ok"
    number, text = next(iter(outcome.differences.items()))
    return text if outcome.num_receipts == 1 else f"receipt {number} {text}"
