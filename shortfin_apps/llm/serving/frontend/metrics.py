"""Prometheus metrics, with vLLM's names where vLLM has the metric and `shortfin_llm:` names elsewhere.

Latencies are measured here, on the HTTP side. The engine's counters are read at each scrape.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from shortfin_apps.llm.components.engine.speculation import SpeculationCounts
from shortfin_apps.llm.components.engine.stats import EngineStats
from shortfin_apps.llm.components.invocation.entry_counts import BOUNDS, EntryCounts, TableCounts
from shortfin_apps.llm.components.kvcache.lease import CacheUsage
from shortfin_apps.llm.components.request.messages import ComputedTask, FinishReason
from shortfin_apps.llm.contract.errors import OverloadedError, UnavailableError
from shortfin_apps.llm.serving.frontend.engine_client import EngineClient

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 40, 160)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1, 2.5, 10, 80)
REQUEST_BUCKETS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 20, 40, 60, 120, 480, 1920, 7680)
LENGTH_BUCKETS = tuple(float(2**i) for i in range(18))
OTHER_TENANTS = "other"


class ServerMetrics:
    """The metrics of one server, in their own registry.

    `engine_pid`: the process that runs the engine, if it is not this process. Tokens of `tenants` are counted
    by tenant name; tokens of all other tenants are counted as OTHER_TENANTS. With several API processes, each
    counts its own requests; `exposition` can show the sums.
    """

    def __init__(
        self,
        model_name: str,
        clock: Callable[[], float] = time.monotonic,
        engine_pid: int | None = None,
        tenants: Sequence[str] = (),
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.clock = clock
        self._model_name = model_name
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token", TTFT_BUCKETS)
        self.itl = TokenHistogram(
            "vllm:inter_token_latency_seconds", "Between two steps' tokens", TOKEN_BUCKETS, model_name
        )
        self.registry.register(self.itl)
        self.tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean of a request after its first token", TOKEN_BUCKETS
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token", REQUEST_BUCKETS)
        self.queue = self._histogram("request_queue_time_seconds", "Arrival to first step", REQUEST_BUCKETS)
        self.prompt_length = self._histogram("request_prompt_tokens", "Prompt length", LENGTH_BUCKETS)
        self.output_length = self._histogram("request_generation_tokens", "Tokens generated", LENGTH_BUCKETS)
        self.max_tokens = self._histogram("request_params_max_tokens", "Tokens allowed", LENGTH_BUCKETS)
        finished = self._counter("request_success", "Requests ended, by finish reason", "finished_reason")
        self.finished = {reason: finished.labels(model_name, reason.value) for reason in FinishReason}
        rejections = self._counter(
            "admission_rejections", "Requests refused at admission, by reason", "reason"
        )
        self._rejections = {
            OverloadedError: rejections.labels(model_name, "queue_full"),
            UnavailableError: rejections.labels(model_name, "unavailable"),
        }
        tokens = self._counter(
            "tenant_tokens", "Prompt and generated tokens of ended requests", "tenant", prefix="shortfin_llm"
        )
        names = dict.fromkeys([*tenants, OTHER_TENANTS])
        self._tenant_tokens = {name: tokens.labels(model_name, name) for name in names}
        self._counted = frozenset(family.name for family in self.registry.collect())
        # process_*: memory, CPU time and open files of the engine's process
        ProcessCollector(registry=self.registry, pid=lambda: engine_pid or "self")

    def watch(self, engine: EngineClient) -> None:
        """Add the engine's counters and gauges. Call once, when the engine is loaded."""
        self.registry.register(_EngineCollector(engine, self._model_name))

    def show_state(self, ready: Callable[[], bool], healthy: Callable[[], bool]) -> None:
        """Add gauges for the results of `/ready` and `/health`. Call once."""
        self.registry.register(_StateCollector(self._model_name, ready, healthy))

    def start_request(
        self, prompt_tokens: int, max_tokens: int, *, tenant: str = "", is_traced: bool = False
    ) -> RequestTimer:
        return RequestTimer(self, prompt_tokens, max_tokens, tenant=tenant, is_traced=is_traced)

    def rejected(self, error: BaseException) -> None:
        """Count a request that the engine did not admit."""
        if (counter := self._rejections.get(type(error))) is not None:
            counter.inc()

    def served(self, tenant: str, num_tokens: int) -> None:
        """Count the tokens of a request that has ended."""
        counter = self._tenant_tokens.get(tenant, self._tenant_tokens[OTHER_TENANTS])
        counter.inc(num_tokens)

    def counts(self) -> list[float]:
        """Return this process's counts, in an order that is the same in all processes of a server."""
        return [sample.value for family in self._counted_families() for sample in family.samples]

    def exposition(self, counts: Sequence[float] | None = None) -> bytes:
        """Return all metrics in Prometheus's text format; `counts`, if given, replace this process's."""
        return generate_latest(self.registry if counts is None else _WithCounts(self, counts))

    def replaced(self, counts: Sequence[float]) -> Iterator[Metric]:
        """Yield all families of the registry; `counts` are the values of the samples of `counts()`."""
        values = iter(counts)
        for family in self.registry.collect():
            if family.name in self._counted:
                family.samples = [_with_value(sample, next(values)) for sample in family.samples]
            yield family

    def _counted_families(self) -> Iterator[Metric]:
        return (family for family in self.registry.collect() if family.name in self._counted)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"vllm:{name}", help_text, ["model_name"], registry=self.registry, buckets=buckets)
        return family.labels(self._model_name)

    def _counter(self, name: str, help_text: str, label: str, prefix: str = "vllm") -> Counter:
        return Counter(f"{prefix}:{name}", help_text, ["model_name", label], registry=self.registry)


class _WithCounts(CollectorRegistry):
    """A registry that exposes `metrics` with other counts."""

    def __init__(self, metrics: ServerMetrics, counts: Sequence[float]) -> None:
        super().__init__()
        self._metrics = metrics
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        return self._metrics.replaced(self._counts)


def _with_value(sample: Sample, value: float) -> Sample:
    """Return the sample with another value; a creation time, which is no count, is left unchanged."""
    return sample if sample.name.endswith("_created") else sample._replace(value=value)


class TokenHistogram(Collector):
    """A histogram that is updated at every token, by the event loop's thread only; therefore it has no locks.

    `buckets` are upper bounds.
    """

    def __init__(self, name: str, help_text: str, buckets: Sequence[float], model_name: str) -> None:
        self._name = name
        self._help_text = help_text
        self._buckets = buckets
        self._model_name = model_name
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._buckets, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._help_text, labels=["model_name"])
        family.add_metric([self._model_name], _cumulative(self._buckets, self._counts), self._sum)
        yield family


class RequestTimer:
    """Measures the latencies of one request; a request that is never admitted adds nothing to the metrics.

    `first_s`: time of the first token on the metrics' clock; `queue_s`: wait for the first step; None before
    the first token. `last_s`: time of the newest token, or of the arrival if there is none. `finish_reason`
    and `ended_s` are None until the request ends. `computed` is None unless the request is traced.
    """

    __slots__ = (
        *("_max_tokens", "_metrics", "_prompt_tokens", "_tenant", "arrival_s", "cached_tokens", "computed"),
        *("detokenise_s", "ended_s", "finish_reason", "first_s", "last_s", "num_tokens", "queue_s"),
    )

    def __init__(
        self,
        metrics: ServerMetrics,
        prompt_tokens: int,
        max_tokens: int,
        *,
        tenant: str = "",
        is_traced: bool = False,
    ) -> None:
        self._metrics = metrics
        self._tenant = tenant
        self._prompt_tokens = prompt_tokens
        self._max_tokens = max_tokens
        self.arrival_s = self.last_s = metrics.clock()
        self.ended_s: float | None = None
        self.computed: list[ComputedTask] | None = [] if is_traced else None
        self.detokenise_s = 0.0  # measured only if traced
        self.first_s: float | None = None
        self.queue_s: float | None = None
        self.num_tokens = self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None

    def tokens(self, count: int, queue_s: float, cached_tokens: int = 0) -> None:
        """Record `count` tokens that have arrived together now.

        `queue_s`: wait of the request for its first step. `cached_tokens`: prompt tokens that were found in
        the prefix cache.
        """
        if count == 0:
            return
        now = self._metrics.clock()
        if cached_tokens > self.cached_tokens:
            self.cached_tokens = cached_tokens
        if self.first_s is None:
            self._metrics.ttft.observe(now - self.arrival_s)
            self._metrics.queue.observe(queue_s)
            self.first_s, self.queue_s = now, queue_s
        else:
            self._metrics.itl.observe(now - self.last_s)
        self.num_tokens += count
        self.last_s = now

    @contextmanager
    def detokenising(self) -> Iterator[None]:
        """Add the time spent in the context to `detokenise_s`."""
        began_s = self._metrics.clock()
        yield
        self.detokenise_s += self._metrics.clock() - began_s

    def finish(self, reason: FinishReason) -> None:
        metrics = self._metrics
        self.finish_reason = reason
        metrics.finished[reason].inc()
        self.ended_s = metrics.clock()
        metrics.e2e.observe(self.ended_s - self.arrival_s)
        metrics.served(self._tenant, self._prompt_tokens + self.num_tokens)
        metrics.prompt_length.observe(self._prompt_tokens)
        metrics.output_length.observe(self.num_tokens)
        metrics.max_tokens.observe(self._max_tokens)
        if self.first_s is not None and self.num_tokens > 1:
            metrics.tpot.observe((self.last_s - self.first_s) / (self.num_tokens - 1))


class _StateCollector(Collector):
    def __init__(self, model_name: str, ready: Callable[[], bool], healthy: Callable[[], bool]) -> None:
        self._model_name = model_name
        self._ready = ready
        self._healthy = healthy

    def collect(self) -> Iterator[Metric]:
        for name, help_text, state in (
            ("shortfin_llm:ready", "1 if requests are accepted, as /ready says", self._ready()),
            ("shortfin_llm:healthy", "1 if the engine works, as /health says", self._healthy()),
        ):
            family = GaugeMetricFamily(name, help_text, labels=["model_name"])
            family.add_metric([self._model_name], float(state))
            yield family


class _EngineCollector(Collector):
    def __init__(self, engine: EngineClient, model_name: str) -> None:
        self._engine = engine
        self._labels = {"model_name": model_name}

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for name, help_text, gauge in _gauges(stats):
            yield self._family(GaugeMetricFamily(name, help_text), gauge)
        for name, help_text, count in _counters(stats):
            yield self._family(CounterMetricFamily(name, help_text), count)
        yield self._cache_config(stats)
        yield from self._entries(sorted(stats.entries.items()))
        yield self._table_rows(stats.block_tables)
        by_source = CounterMetricFamily("vllm:prompt_tokens_by_source", "Prompt tokens, by origin")
        for source, count in (
            ("local_compute", stats.prompt_tokens),
            ("local_cache_hit", stats.cached_tokens),
        ):
            labels = {**self._labels, "source": source}
            by_source.add_sample("vllm:prompt_tokens_by_source_total", labels, count)
        yield by_source

    def _cache_config(self, stats: EngineStats) -> Metric:
        """Return vLLM's metric of the cache; routers read the cache's size from the labels."""
        family = GaugeMetricFamily("vllm:cache_config_info", "The KV cache, by its labels; always 1")
        labels = {
            "block_size": str(stats.page_tokens),
            "num_gpu_blocks": str(stats.pages.total),
            "enable_prefix_caching": str(stats.shares_prefixes),
        }
        family.add_sample(family.name, {**self._labels, **labels}, 1)
        return family

    def _entries(self, entries: Sequence[tuple[str, EntryCounts]]) -> Iterator[Metric]:
        labels = [*self._labels, "entry"]
        invocations = CounterMetricFamily(
            "shortfin_llm:invocations", "Invocations, by entry and its class", labels=[*labels, "class"]
        )
        tokens = CounterMetricFamily(
            "shortfin_llm:computed_tokens", "Rows computed, by kind", labels=[*labels, "kind"]
        )
        mixes = [HistogramMetricFamily(name, help_text, labels=labels) for name, help_text in _MIXES]
        for entry, counts in entries:
            values = [*self._labels.values(), entry]
            invocations.add_metric([*values, counts.entry_class], counts.invocations)
            for kind, count in _tokens_by_kind(counts):
                tokens.add_metric([*values, kind], count)
            distributions = (counts.tasks, counts.prefill_tokens, counts.decode_tokens)
            for mix, distribution in zip(mixes, distributions, strict=True):
                mix.add_metric(values, _cumulative(BOUNDS, distribution.bins), distribution.total)
        yield from (invocations, tokens, *mixes)

    def _table_rows(self, counts: TableCounts) -> Metric:
        family = CounterMetricFamily(
            "shortfin_llm:table_rows",
            "Rows of block tables filled for a new request, or extended",
            labels=[*self._labels, "why"],
        )
        for why, count in (("joined", counts.rows_joined), ("grew", counts.rows_grew)):
            family.add_metric([*self._labels.values(), why], count)
        return family

    def _family(self, family: Metric, value: float) -> Metric:
        suffix = "_total" if family.type == "counter" else ""
        family.add_sample(family.name + suffix, self._labels, value)
        return family


_MIXES = (
    ("shortfin_llm:invocation_tasks", "Tasks in an invocation"),
    ("shortfin_llm:invocation_prefill_tokens", "Tokens of prefills in an invocation"),
    ("shortfin_llm:invocation_decode_tokens", "Tokens of decodes in an invocation"),
)


def _tokens_by_kind(counts: EntryCounts) -> list[tuple[str, int]]:
    return [
        ("prefill", counts.prefill_tokens.total),
        ("decode", counts.decode_tokens.total),
        ("padding", counts.padded_tokens),
    ]


def _cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return a histogram's cumulative buckets, with `+Inf` as the last bound."""
    return list(zip([*(str(float(bound)) for bound in bounds), "+Inf"], accumulate(counts), strict=True))


def _gauges(stats: EngineStats) -> list[tuple[str, str, float]]:
    return [
        ("vllm:num_requests_running", "Requests with tokens in flight", stats.num_running),
        ("vllm:num_requests_waiting", "Requests not yet started", stats.num_waiting),
        ("shortfin_llm:tenants_waiting", "Tenants with requests not yet started", stats.num_waiting_tenants),
        (
            "shortfin_llm:consecutive_failures",
            "Invocations that failed since the last one that did not",
            stats.consecutive_failures,
        ),
        (
            "shortfin_llm:device_lost",
            "1 if the device has failed for good, and the server must be restarted",
            float(stats.lost_device is not None),
        ),
        ("vllm:kv_cache_usage_perc", "Share of pages in use by requests, 0 to 1", _used(stats)),
        *_page_gauges("pages", "", stats.pages),
        *_page_gauges("window_pages", " of layers with a window", stats.window_pages),
    ]


def _used(stats: EngineStats) -> float:
    """Return the share of pages in use, the larger one of full-context pages and window pages."""
    kinds = [usage for usage in (stats.pages, stats.window_pages) if usage is not None and usage.total]
    return max((usage.leased / usage.total for usage in kinds), default=0.0)


def _page_gauges(name: str, of: str, usage: CacheUsage | None) -> list[tuple[str, str, float]]:
    """Return the gauges of one kind of page. `name`: prefix of the gauges' names; `of`: kind, in words."""
    if usage is None:
        return []
    return [
        (f"shortfin_llm:{name}", f"Pages of the KV cache{of}", usage.total),
        (f"shortfin_llm:{name}_free", f"Free pages{of}", usage.free),
        (
            f"shortfin_llm:{name}_cached",
            f"Pages{of} cached for their prefix and used by no request",
            usage.cached,
        ),
        (f"shortfin_llm:{name}_leased", f"Pages{of} in use by requests", usage.leased),
    ]


def _speculation_counters(counts: SpeculationCounts | None) -> list[tuple[str, str, float]]:
    if counts is None:
        return []
    return [
        ("vllm:spec_decode_num_drafts", "Times that tokens were proposed for a request", counts.drafts),
        ("vllm:spec_decode_num_draft_tokens", "Tokens proposed", counts.proposed),
        ("vllm:spec_decode_num_accepted_tokens", "Tokens proposed that were right", counts.accepted),
        ("shortfin_llm:draft_model_seconds", "Time in a draft model's invocations", counts.draft_model_s),
    ]


def _counters(stats: EngineStats) -> list[tuple[str, str, float]]:
    queried = stats.prompt_tokens + stats.cached_tokens
    return [
        *_speculation_counters(stats.speculation),
        ("vllm:prompt_tokens", "Prompt tokens processed, cached ones included", queried),
        ("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache", stats.cached_tokens),
        ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", queried),
        ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.cached_tokens),
        ("vllm:generation_tokens", "Tokens generated", stats.generation_tokens),
        ("vllm:num_preemptions", "Preemptions for lack of pages", stats.preemptions),
        ("shortfin_llm:failed_invocations", "Invocations that failed", stats.failed_invocations),
        ("shortfin_llm:steps", "Engine steps", stats.steps),
        ("shortfin_llm:block_table_uploads", "Steps whose block table changed", stats.block_tables.uploads),
        ("shortfin_llm:uploads", "Arrays copied to the device", stats.uploads),
        (
            "shortfin_llm:steps_ahead",
            "Decode steps queued before the tokens of the step before were back",
            stats.steps_ahead,
        ),
        (
            "shortfin_llm:discarded_tokens",
            "Tokens computed ahead for requests that had ended",
            stats.discarded_tokens,
        ),
        ("shortfin_llm:padded_tokens", "Padding rows computed", stats.padded_tokens),
        ("shortfin_llm:self_tests", "Self-tests of the model", stats.self_tests),
        ("shortfin_llm:self_test_failures", "Self-tests that found it wrong", stats.self_test_failures),
        ("shortfin_llm:step_seconds", "Time inside steps", stats.step_s),
        ("shortfin_llm:device_seconds", "Time inside steps spent waiting for the device", stats.device_s),
    ]
