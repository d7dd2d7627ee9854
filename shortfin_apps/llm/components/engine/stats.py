"""Counters and gauges of the engine, as `/metrics` shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shortfin_apps.llm.components.invocation.entry_counts import EntryCounts, PlanCounts
from shortfin_apps.llm.components.kvcache.base import CacheUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since start, and gauges of this moment. Seconds are wall time of the engine's thread."""

    num_waiting: int
    num_running: int
    pages: CacheUsage
    steps: int
    plans: PlanCounts  # what it took to lay out block tables
    prompt_tokens: int  # computed, without those found in the cache
    cached_tokens: int  # found in the cache, counted once at admission
    generation_tokens: int
    preemptions: int
    entries: Mapping[str, EntryCounts]  # by name, those that ran
    step_s: float  # total time inside steps
    device_s: float  # of that, between submit and the results' arrival
    failures_in_a_row: int = 0  # invocations that failed since the last one that did not

    @property
    def padded_tokens(self) -> int:
        """Rows computed for nobody."""
        return sum(counts.padded_tokens for counts in self.entries.values())
