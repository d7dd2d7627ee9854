"""Counters and gauges of the engine, as `/metrics` shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shortfin_apps.llm.components.batching.batch import LlmTaskInput
from shortfin_apps.llm.components.engine.speculation import SpeculationCounts
from shortfin_apps.llm.components.invocation.entry_counts import EntryCounts, PlanCounts
from shortfin_apps.llm.components.kvcache.base import CacheUsage


@dataclass(kw_only=True)
class EngineCounters:
    """Counters since start. The engine's thread alone writes them."""

    steps: int = 0
    tasks: int = 0
    prompt_tokens: int = 0  # computed, without those found in the cache
    cached_tokens: int = 0  # found in the cache, counted once at admission
    generation_tokens: int = 0
    step_s: float = 0.0  # total wall time inside steps
    failed_invocations: int = 0
    consecutive_failures: int = 0  # invocations that failed since the last one that did not
    lost_device: str | None = None  # the error with which the device failed for good
    self_tests: int = 0
    self_test_failures: int = 0
    failed_self_test: str | None = None  # what the last one found to be wrong

    def count_task(self, task: LlmTaskInput) -> None:
        """Counts a task that was computed; before `num_computed` and `last_turn` of its request change."""
        self.tasks += 1
        if task.request.num_generated == 0:
            self.prompt_tokens += len(task.token_ids)
        if task.request.last_turn < 0:
            self.cached_tokens += task.request.num_cached

    def count_decodes(self, count: int) -> None:
        """Counts tasks that were computed and sampled, of requests that had a token of output before."""
        self.tasks += count
        self.generation_tokens += count

    def count_step(self, duration_s: float) -> None:
        self.steps += 1
        self.step_s += duration_s


@dataclass(kw_only=True)
class EngineStats(EngineCounters):
    """A copy of the counters, and the gauges of the same moment, for other threads to read."""

    page_tokens: int  # tokens of a page
    shares_prefixes: bool  # whether the cache does
    num_waiting: int
    num_running: int
    queue_tokens: int = 0  # in prompts that were admitted and have no first token yet
    num_waiting_tenants: int = 0
    pages: CacheUsage
    window_pages: CacheUsage | None = None  # of layers that see a window of tokens alone
    plans: PlanCounts  # block tables laid out and uploaded
    preemptions: int
    entries: Mapping[str, EntryCounts]  # by name, those that ran
    uploads: int  # arrays copied to the device
    steps_ahead: int  # decode steps queued before the tokens of the step before were back
    discarded_tokens: int  # computed in such a step for requests that had ended
    speculation: SpeculationCounts | None = None  # None where it is off
    device_s: float  # of `step_s`, between submit and the results' arrival

    @property
    def padded_tokens(self) -> int:
        """Padding rows computed."""
        return sum(counts.padded_tokens for counts in self.entries.values())
