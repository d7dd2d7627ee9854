"""Counters and gauges of the engine, as `/metrics` shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shortfin_apps.llm.components.batching.batch import LlmTaskInput
from shortfin_apps.llm.components.invocation.entry_counts import EntryCounts, PlanCounts
from shortfin_apps.llm.components.kvcache.base import CacheUsage


@dataclass(slots=True)
class EngineCounters:
    """Counters since start; the fields of EngineStats of the same names. The engine's thread alone writes."""

    steps: int = 0
    tasks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    step_s: float = 0.0
    consecutive_failures: int = 0

    def count_task(self, task: LlmTaskInput) -> None:
        """Counts a task that was computed, before its request notes that it was."""
        self.tasks += 1
        if task.request.num_generated == 0:
            self.prompt_tokens += len(task.input_tokens)
        if task.request.last_turn < 0:
            self.cached_tokens += task.request.num_cached

    def count_step(self, duration_s: float) -> None:
        self.steps += 1
        self.step_s += duration_s


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
    consecutive_failures: int = 0  # invocations that failed since the last one that did not

    @property
    def padded_tokens(self) -> int:
        """Padding rows computed."""
        return sum(counts.padded_tokens for counts in self.entries.values())
