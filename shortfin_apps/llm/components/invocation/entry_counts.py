"""Counters of invocations by entry, and of block table updates. Only the engine's thread writes them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shortfin_apps.llm.components.runtime.device import EntrySignature
from shortfin_apps.llm.contract.abi import Entry, EntryClass

BOUNDS = (0, *(2**power for power in range(14)))  # upper bounds of the bins; the last bin has none


@dataclass(slots=True)
class Distribution:
    """Histogram of sizes: `bins[i]` counts sizes in `(BOUNDS[i - 1], BOUNDS[i]]`; `total` is their sum."""

    bins: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: int = 0

    def add(self, size: int) -> None:
        self.bins[bisect_left(BOUNDS, size)] += 1
        self.total += size

    def copy(self) -> Distribution:
        return Distribution(self.bins.copy(), self.total)


@dataclass(slots=True)
class EntryCounts:
    """Histograms over an entry's invocations: number of tasks, prefill tokens and decode tokens."""

    entry_class: EntryClass
    tasks: Distribution = field(default_factory=Distribution)
    prefill_tokens: Distribution = field(default_factory=Distribution)
    decode_tokens: Distribution = field(default_factory=Distribution)
    invocations: int = 0
    padded_tokens: int = 0

    def add(self, lengths: Sequence[int], rows: int) -> None:
        """Count an invocation of `rows` tokens with padding; a task with a length of 1 is a decode."""
        decodes = lengths.count(1)
        total = sum(lengths)
        self.tasks.add(len(lengths))
        self.prefill_tokens.add(total - decodes)
        self.decode_tokens.add(decodes)
        self.invocations += 1
        self.padded_tokens += rows - total

    def copy(self) -> EntryCounts:
        return EntryCounts(
            self.entry_class,
            self.tasks.copy(),
            self.prefill_tokens.copy(),
            self.decode_tokens.copy(),
            self.invocations,
            self.padded_tokens,
        )


def counts_of(functions: Mapping[str, EntrySignature]) -> dict[str, EntryCounts]:
    """Return counts of no invocations for each of a program's functions that is an entry."""
    return {
        name: EntryCounts(entry.entry_class(is_one_launch=signature.is_one_launch))
        for name, signature in functions.items()
        if (entry := Entry.parse(name)) is not None
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCounts:
    """Counts of block table updates, as defined in `block_tables.py`."""

    rows_joined: int = 0
    rows_grew: int = 0
    uploads: int = 0
