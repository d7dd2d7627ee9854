"""Counts of what invocations computed, by entry, and of what laying out their arguments took.

The engine's thread counts; a scrape reads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

BOUNDS = (0, *(2**power for power in range(14)))  # upper bounds of a distribution's bins; one more is open


@dataclass(slots=True)
class Distribution:
    """How often which sizes came: `bins[i]` counts those up to `BOUNDS[i]` and above the one before."""

    bins: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: int = 0

    def add(self, size: int) -> None:
        self.bins[bisect_left(BOUNDS, size)] += 1
        self.total += size

    def copy(self) -> Distribution:
        return Distribution(self.bins.copy(), self.total)


@dataclass(slots=True)
class EntryCounts:
    """The mix in each invocation of one entry: tasks, and tokens of prefills and of decodes."""

    tasks: Distribution = field(default_factory=Distribution)
    prefill_tokens: Distribution = field(default_factory=Distribution)
    decode_tokens: Distribution = field(default_factory=Distribution)
    invocations: int = 0
    padded_tokens: int = 0

    def add(self, lengths: Sequence[int], rows: int) -> None:
        """One invocation: tokens of each task, and rows computed; a task of a single token is a decode."""
        decodes = lengths.count(1)
        total = sum(lengths)
        self.tasks.add(len(lengths))
        self.prefill_tokens.add(total - decodes)
        self.decode_tokens.add(decodes)
        self.invocations += 1
        self.padded_tokens += rows - total

    def copy(self) -> EntryCounts:
        return EntryCounts(
            self.tasks.copy(),
            self.prefill_tokens.copy(),
            self.decode_tokens.copy(),
            self.invocations,
            self.padded_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCounts:
    """How often what was done to a block table, in the words of `block_tables.py`."""

    plans: int = 0
    rows_joined: int = 0  # without those of plans
    rows_grew: int = 0
    uploads: int = 0
