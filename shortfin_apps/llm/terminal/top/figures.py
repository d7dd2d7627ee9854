"""Reads a server's `/metrics` and computes figures for the time between two readings."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from shortfin_apps.llm.client import LlmClient, ServerError
from shortfin_apps.llm.contract.errors import InvalidRequestError

Labels = Mapping[str, str]
LARGEST = 2.0**64


@dataclass(frozen=True, slots=True)
class Reading:
    """All samples of `/metrics` by name, read at `at_s` (seconds of a monotonic clock)."""

    at_s: float
    samples: Mapping[str, list[tuple[Labels, float]]]

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of a metric's samples with these labels; None if there are none."""
        values = [
            value
            for found, value in self.samples.get(name, ())
            if all(found.get(label) == wanted for label, wanted in labels.items())
        ]
        return sum(values) if values else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Return the sums of a metric's samples, by the value of a label."""
        sums: dict[str, float] = {}
        for found, value in self.samples.get(name, ()):
            if label in found:
                sums[found[label]] = sums.get(found[label], 0.0) + value
        return sums

    def buckets(self, name: str) -> dict[float, float]:
        """Return a histogram's cumulative counts by upper bound, of which the last is infinite."""
        return {float(bound): count for bound, count in self.by_label(f"{name}_bucket", "le").items()}


def parsed(text: str, at_s: float) -> Reading:
    """Parse Prometheus's text format. Raises ServerError for any other text.

    A metric with an unusable sample is omitted: some servers report NaN before the first observation.
    """
    samples: dict[str, list[tuple[Labels, float]]] = {}
    unusable: set[str] = set()
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
                if not _is_figure(sample.value, sample.labels):
                    unusable.add(sample.name)
    except (ValueError, LookupError) as error:
        raise ServerError("the server's /metrics are not in Prometheus's text format") from error
    return Reading(at_s, {name: found for name, found in samples.items() if name not in unusable})


def _is_figure(value: float, labels: Labels) -> bool:
    """Whether a sample's value is finite and at most LARGEST, and its bucket's bound, if any, a number."""
    try:
        return abs(value) <= LARGEST and float(labels.get("le", 0)) > -math.inf
    except ValueError:
        return False


TOKENS_IN, TOKENS_CACHED, TOKENS_OUT = (
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:generation_tokens_total",
)
TTFT, ITL = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
FINISHED, REFUSED = "vllm:request_success_total", "vllm:admission_rejections_total"
INVOCATIONS, COMPUTED, TASKS = (
    "shortfin_llm:invocations_total",
    "shortfin_llm:computed_tokens_total",
    "shortfin_llm:invocation_tasks_sum",
)


@dataclass(frozen=True, slots=True)
class Pages:
    """Numbers of pages of the KV cache: used by requests, cached for prefix reuse, and free."""

    total: int
    used: int
    cached: int
    free: int


@dataclass(frozen=True, slots=True)
class EntryMix:
    """The work of one entry of the compiled model in an interval. `tasks` is the mean per invocation."""

    entry: str
    invocations_per_s: float
    tasks: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    padding_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of an interval between two readings; None for a figure that the server does not report.

    `running`, `waiting` and the pages are as of the interval's end. `finished` and `refused`: numbers of
    requests by reason. `busy_share`: share of the interval spent in engine steps. Percentiles are
    interpolated within the server's histogram buckets, as Prometheus does.
    """

    running: int | None
    waiting: int | None
    pages: Pages | None
    window_pages: Pages | None
    seconds: float | None = None
    tokens_in_per_s: float | None = None
    tokens_out_per_s: float | None = None
    cached_share: float | None = None
    finished: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=dict)
    preemptions: int | None = None
    busy_share: float | None = None
    ttft_ms_p50: float | None = None
    ttft_ms_p99: float | None = None
    itl_ms_p50: float | None = None
    itl_ms_p99: float | None = None
    entries: tuple[EntryMix, ...] = ()


def is_same_process(before: Reading, after: Reading) -> bool:
    """Whether both readings are of the same process of the server. A restart would reset all counters."""
    started = "process_start_time_seconds"
    if before.total(started) != after.total(started):
        return False
    names = (TOKENS_IN, TOKENS_OUT, f"{TTFT}_count")
    return all((after.total(name) or 0.0) >= (before.total(name) or 0.0) for name in names)


def figures_of(before: Reading | None, after: Reading) -> Figures:
    """Compute the figures between two readings of the same process.

    Without `before`, only the figures of the state at `after` are set.
    """
    state = Figures(
        running=_whole(after.total("vllm:num_requests_running")),
        waiting=_whole(after.total("vllm:num_requests_waiting")),
        pages=_pages(after, "shortfin_llm:pages"),
        window_pages=_pages(after, "shortfin_llm:window_pages"),
    )
    return state if before is None else _Between(before, after).added_to(state)


class _Between:
    def __init__(self, before: Reading, after: Reading) -> None:
        self._before = before
        self._after = after
        self.seconds = after.at_s - before.at_s

    def added_to(self, state: Figures) -> Figures:
        return replace(
            state,
            seconds=self.seconds,
            tokens_in_per_s=self.rate(TOKENS_IN),
            tokens_out_per_s=self.rate(TOKENS_OUT),
            cached_share=self.share(TOKENS_CACHED, TOKENS_IN),
            finished=self.counts(FINISHED, "finished_reason"),
            refused=self.counts(REFUSED, "reason"),
            preemptions=_whole(self.change("vllm:num_preemptions_total")),
            busy_share=self.rate("shortfin_llm:step_seconds_total"),
            ttft_ms_p50=self.quantile_ms(TTFT, 0.5),
            ttft_ms_p99=self.quantile_ms(TTFT, 0.99),
            itl_ms_p50=self.quantile_ms(ITL, 0.5),
            itl_ms_p99=self.quantile_ms(ITL, 0.99),
            entries=self.entries(),
        )

    def change(self, name: str, **labels: str) -> float | None:
        now = self._after.total(name, **labels)
        return None if now is None else now - (self._before.total(name, **labels) or 0.0)

    def rate(self, name: str, **labels: str) -> float | None:
        change = self.change(name, **labels)
        return None if change is None or self.seconds <= 0 else change / self.seconds

    def share(self, part: str, whole: str) -> float | None:
        some, all_ = self.change(part), self.change(whole)
        return some / all_ if some is not None and all_ else None

    def counts(self, name: str, label: str) -> dict[str, int]:
        """Return the nonzero changes of a counter in the interval, by the value of a label."""
        before = self._before.by_label(name, label)
        changes = {
            key: value - before.get(key, 0.0) for key, value in self._after.by_label(name, label).items()
        }
        return {key: round(change) for key, change in changes.items() if round(change)}

    def quantile_ms(self, name: str, share: float) -> float | None:
        before, after = self._before.buckets(name), self._after.buckets(name)
        seconds = quantile({bound: count - before.get(bound, 0.0) for bound, count in after.items()}, share)
        return None if seconds is None else seconds * 1e3

    def entries(self) -> tuple[EntryMix, ...]:
        """Return the entries invoked in the interval, the one with the most computed tokens first."""
        invoked = self.counts(INVOCATIONS, "entry")
        mixes = [self._mix(entry, invocations) for entry, invocations in invoked.items() if invocations > 0]
        return tuple(sorted(mixes, key=lambda mix: -(mix.prefill_tokens_per_s + mix.decode_tokens_per_s)))

    def _mix(self, entry: str, invocations: int) -> EntryMix:
        prefill, decode, padding = (
            self.change(COMPUTED, entry=entry, kind=kind) or 0.0 for kind in ("prefill", "decode", "padding")
        )
        seconds = self.seconds if self.seconds > 0 else math.inf
        return EntryMix(
            entry,
            invocations / seconds,
            (self.change(TASKS, entry=entry) or 0.0) / invocations,
            prefill / seconds,
            decode / seconds,
            padding / ((prefill + decode + padding) or 1.0),
        )


def quantile(cumulative: Mapping[float, float], share: float) -> float | None:
    """Return a histogram's quantile like Prometheus's histogram_quantile; None for an empty histogram.

    `cumulative`: counts by upper bound, of which the last is infinite. The quantile is interpolated linearly
    within its bucket. If it is in the infinite bucket, the largest finite bound is returned.
    """
    bounds = sorted(cumulative)
    if not bounds or cumulative[bounds[-1]] <= 0:
        return None
    wanted = share * cumulative[bounds[-1]]
    lower, below = 0.0, 0.0
    for bound in bounds:
        count = cumulative[bound]
        if count >= wanted and count > below:
            return (
                lower if math.isinf(bound) else lower + (bound - lower) * (wanted - below) / (count - below)
            )
        lower, below = bound, count
    return lower


def _pages(reading: Reading, name: str) -> Pages | None:
    total, used, cached, free = (reading.total(name + part) for part in ("", "_leased", "_cached", "_free"))
    if total is None or used is None or cached is None or free is None:
        return None
    return Pages(round(total), round(used), round(cached), round(free))


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


class WatchedServer:
    """Reads a server's metrics.

    `info`: its `/server_info`; empty before the first reading, or if the server has no such route.
    """

    def __init__(self, client: LlmClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._last: Reading | None = None
        self.info: Mapping[str, Any] = {}

    @property
    def url(self) -> str:
        return self._client.base_url

    async def read(self) -> Figures:
        """Read the figures since the last reading, or only the state if the server was restarted since.

        Raises LlmError.
        """
        reading = parsed(await self._metrics(), self._clock())
        if self._last is None or not is_same_process(self._last, reading):
            self._last = None
            self.info = await self._server_info()
        figures = figures_of(self._last, reading)
        self._last = reading
        return figures

    async def _metrics(self) -> str:
        try:
            return await self._client.metrics()
        except InvalidRequestError as error:
            raise InvalidRequestError(
                f"the server at {self.url} has no /metrics to watch ({error})"
            ) from error

    async def _server_info(self) -> Mapping[str, Any]:
        try:
            return await self._client.server_info()
        except InvalidRequestError:  # not this project's server: it does not have this route
            return {}
