"""Engine counters and gauges, as exported by `/metrics`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shortfin_apps.llm.components.batching.batch import LlmTaskInput
from shortfin_apps.llm.components.engine.speculation import SpeculationCounts
from shortfin_apps.llm.components.invocation.entry_counts import EntryCounts, TableCounts
from shortfin_apps.llm.components.kvcache.lease import CacheUsage


@dataclass(kw_only=True)
class EngineCounters:
    """Counters since start. Only the engine's thread writes them."""

    steps: int = 0
    tasks: int = 0
    prompt_tokens: int = 0  # computed, without tokens found in the cache
    cached_tokens: int = 0  # found in the cache, counted once per request
    generation_tokens: int = 0
    step_s: float = 0.0  # total wall time inside steps
    failed_invocations: int = 0
    consecutive_failures: int = 0  # failed invocations since the last success
    lost_device: str | None = None  # the error of a permanent device failure
    self_tests: int = 0
    self_test_failures: int = 0
    failed_self_test: str | None = None  # the failure of the last self-test, if it failed

    def count_task(self, task: LlmTaskInput) -> None:
        """Count a computed task, and its tokens if the request has no output yet."""
        self.tasks += 1
        if task.start_position > task.request.first_decode:
            return
        if len(task.request.token_ids) == len(task.request.call.prompt_token_ids):
            self.prompt_tokens += len(task.token_ids)
            self.cached_tokens += task.request.num_cached if task.completes else 0

    def count_step(self, duration_s: float) -> None:
        self.steps += 1
        self.step_s += duration_s


@dataclass(kw_only=True)
class EngineStats(EngineCounters):
    """A copy of the counters with gauges from the same moment, for other threads to read."""

    page_tokens: int  # tokens per page
    shares_prefixes: bool  # whether the cache shares prefixes
    num_waiting: int
    num_running: int
    queue_tokens: int = 0  # tokens of admitted prompts whose first output token is not sampled yet
    num_waiting_tenants: int = 0
    pages: CacheUsage
    window_pages: CacheUsage | None = None  # of sliding-window layers
    block_tables: TableCounts
    preemptions: int
    entries: Mapping[str, EntryCounts]  # by name; only entries that ran
    uploads: int  # arrays copied to the device
    steps_ahead: int  # decode steps queued before the previous step's tokens arrived
    discarded_tokens: int  # tokens computed in such steps for ended requests
    speculation: SpeculationCounts | None = None  # None without speculation
    device_s: float  # part of `step_s` from submission to the arrival of results

    @property
    def padded_tokens(self) -> int:
        """Number of computed padding tokens."""
        return sum(counts.padded_tokens for counts in self.entries.values())
