from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from shortfin_apps.llm.components.engine.speculation import SpeculationCounts
from shortfin_apps.llm.components.engine.stats import EngineStats
from shortfin_apps.llm.components.kvcache.lease import CacheUsage
from shortfin_apps.llm.components.request.messages import FinishReason
from shortfin_apps.llm.contract.errors import OverloadedError
from shortfin_apps.llm.serving.frontend.metrics import TOKEN_BUCKETS, ServerMetrics, TokenHistogram
from tests.components.stepped_engine import SteppedClock
from tests.serving.api.scripted_engine import ScriptedEngine


def value(metrics: ServerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"model_name": "m", **labels})


def test_latencies_of_a_request() -> None:
    clock = SteppedClock()
    metrics = ServerMetrics("m", clock)
    timer = metrics.start_request(prompt_tokens=7, max_tokens=20)
    for seconds, count in ((0.5, 1), (0.25, 0), (0.25, 2), (1.0, 1)):
        clock.now_s += seconds
        timer.tokens(count, queue_s=0.125)
    clock.now_s += 3
    timer.finish(FinishReason.LENGTH)
    assert value(metrics, "vllm:time_to_first_token_seconds_sum") == pytest.approx(0.5)
    assert value(metrics, "vllm:request_queue_time_seconds_sum") == pytest.approx(0.125)
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 2
    assert value(metrics, "vllm:inter_token_latency_seconds_sum") == pytest.approx(1.5)
    assert value(metrics, "vllm:e2e_request_latency_seconds_sum") == pytest.approx(5.0)
    assert value(metrics, "vllm:request_time_per_output_token_seconds_sum") == pytest.approx(0.5)
    assert value(metrics, "vllm:request_prompt_tokens_sum") == 7
    assert value(metrics, "vllm:request_generation_tokens_sum") == 4
    assert value(metrics, "vllm:request_params_max_tokens_sum") == 20
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 0


def test_a_request_without_tokens_has_no_time_to_first_token() -> None:
    metrics = ServerMetrics("m")
    metrics.start_request(1, 1).finish(FinishReason.ABORT)
    assert value(metrics, "vllm:time_to_first_token_seconds_count") == 0
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 1


def test_rejections_are_counted_by_reason() -> None:
    metrics = ServerMetrics("m")
    metrics.rejected(OverloadedError("full"))
    metrics.rejected(ValueError("a bug is no rejection"))
    assert value(metrics, "vllm:admission_rejections_total", reason="queue_full") == 1
    assert value(metrics, "vllm:admission_rejections_total", reason="unavailable") == 0


def test_process_metrics_are_exported() -> None:
    samples = {sample.name for family in ServerMetrics("m").registry.collect() for sample in family.samples}
    assert {
        *("process_cpu_seconds_total", "process_resident_memory_bytes", "process_virtual_memory_bytes"),
        *("process_open_fds", "process_max_fds", "process_start_time_seconds"),
    } <= samples


async def test_engine_counters_are_read_when_scraped() -> None:
    metrics = ServerMetrics("m")
    metrics.watch(ScriptedEngine(lambda call: iter(())))
    expected = {
        "vllm:num_requests_running": 2,
        "vllm:num_requests_waiting": 1,
        "vllm:kv_cache_usage_perc": 0.4,
        "vllm:prompt_tokens_total": 16,
        "vllm:prefix_cache_queries_total": 16,
        "vllm:prefix_cache_hits_total": 5,
        "vllm:generation_tokens_total": 13,
        "vllm:num_preemptions_total": 1,
        "shortfin_llm:steps_total": 7,
        "shortfin_llm:block_table_uploads_total": 6,
        "shortfin_llm:uploads_total": 21,
        "shortfin_llm:steps_ahead_total": 3,
        "shortfin_llm:discarded_tokens_total": 2,
        "shortfin_llm:padded_tokens_total": 17,
        "shortfin_llm:self_tests_total": 4,
        "shortfin_llm:self_test_failures_total": 1,
        "shortfin_llm:step_seconds_total": 0.5,
        "shortfin_llm:device_seconds_total": 0.4,
    }
    assert {name: value(metrics, name) for name in expected} == expected
    for entry, entry_class, count in (("prefill_bs1", "dynamic", 1), ("decode_bs4", "static", 6)):
        labels = {"entry": entry, "class": entry_class}
        assert value(metrics, "shortfin_llm:invocations_total", **labels) == count
    rows = {("decode_bs4", "decode"): 18, ("decode_bs4", "prefill"): 0, ("decode_bs4", "padding"): 6}
    rows |= {("prefill_bs1", "decode"): 0, ("prefill_bs1", "prefill"): 117, ("prefill_bs1", "padding"): 11}
    name = "shortfin_llm:computed_tokens_total"
    assert {key: value(metrics, name, entry=key[0], kind=key[1]) for key in rows} == rows
    assert value(metrics, "shortfin_llm:table_rows_total", why="joined") == 4
    assert value(metrics, "shortfin_llm:table_rows_total", why="grew") == 9
    assert value(metrics, "vllm:prompt_tokens_by_source_total", source="local_compute") == 11


async def test_the_cache_is_described_in_labels() -> None:
    """llm-d's router reads these two labels as decimal numbers."""
    metrics = ServerMetrics("m")
    metrics.watch(ScriptedEngine(lambda call: iter(())))
    labels = {"block_size": "16", "num_gpu_blocks": "10", "enable_prefix_caching": "True"}
    assert value(metrics, "vllm:cache_config_info", **labels) == 1
    assert metrics.exposition().count(b"\nvllm:cache_config_info{") == 1


class Speculating(ScriptedEngine):
    def stats(self) -> EngineStats:
        return replace(
            super().stats(), speculation=SpeculationCounts(4, proposed=20, accepted=7, draft_model_s=1.5)
        )


async def test_proposed_tokens_are_counted_where_there_are_any() -> None:
    metrics, without = ServerMetrics("m"), ServerMetrics("m")
    metrics.watch(Speculating(lambda call: iter(())))
    without.watch(ScriptedEngine(lambda call: iter(())))
    names = ("drafts", "draft_tokens", "accepted_tokens")
    assert [value(metrics, f"vllm:spec_decode_num_{name}_total") for name in names] == [4, 20, 7]
    assert value(metrics, "shortfin_llm:draft_model_seconds_total") == 1.5
    assert b"spec_decode" not in without.exposition()


class WithWindows(ScriptedEngine):
    def stats(self) -> EngineStats:
        return replace(super().stats(), window_pages=CacheUsage(total=4, free=1, cached=0, leased=3))


async def test_pages_of_windows_are_counted_beside_the_others() -> None:
    """Usage is that of the pages that there are fewer left of."""
    metrics, without = ServerMetrics("m"), ServerMetrics("m")
    metrics.watch(WithWindows(lambda call: iter(())))
    without.watch(ScriptedEngine(lambda call: iter(())))
    names = ("pages", "pages_leased", "window_pages", "window_pages_free", "window_pages_leased")
    assert [value(metrics, f"shortfin_llm:{name}") for name in names] == [10, 4, 4, 1, 3]
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.75
    assert value(without, "shortfin_llm:window_pages") is None


async def test_the_mix_in_each_invocation() -> None:
    metrics = ServerMetrics("m")
    metrics.watch(ScriptedEngine(lambda call: iter(())))
    decode, prefill = {"entry": "decode_bs4"}, {"entry": "prefill_bs1"}
    assert value(metrics, "shortfin_llm:invocation_tasks_sum", **decode) == 18
    assert value(metrics, "shortfin_llm:invocation_tasks_count", **decode) == 6
    assert value(metrics, "shortfin_llm:invocation_decode_tokens_bucket", le="2.0", **decode) == 0
    assert value(metrics, "shortfin_llm:invocation_decode_tokens_bucket", le="4.0", **decode) == 6
    assert value(metrics, "shortfin_llm:invocation_prefill_tokens_bucket", le="0.0", **decode) == 6
    assert value(metrics, "shortfin_llm:invocation_prefill_tokens_bucket", le="64.0", **prefill) == 0
    assert value(metrics, "shortfin_llm:invocation_prefill_tokens_bucket", le="128.0", **prefill) == 1
    assert value(metrics, "shortfin_llm:invocation_prefill_tokens_bucket", le="+Inf", **prefill) == 1


def test_two_servers_do_not_share_metrics() -> None:
    one, other = ServerMetrics("m"), ServerMetrics("m")
    one.start_request(1, 1).finish(FinishReason.STOP)
    assert value(other, "vllm:request_success_total", finished_reason="stop") == 0


@given(st.lists(st.floats(0, 100)))
def test_a_token_histogram_is_that_of_the_library(values: list[float]) -> None:
    registry = CollectorRegistry()
    ours = TokenHistogram("ours", "", TOKEN_BUCKETS, "m")
    registry.register(ours)
    theirs = Histogram("theirs", "", ["model_name"], registry=registry, buckets=TOKEN_BUCKETS).labels("m")
    for value in values:
        ours.observe(value)
        theirs.observe(value)
    samples = {
        name: [
            (s.name.removeprefix(name), s.labels, s.value) for s in family.samples if "created" not in s.name
        ]
        for family in registry.collect()
        if (name := family.name)
    }
    assert sorted(samples["ours"], key=str) == sorted(samples["theirs"], key=str)


def test_counts_of_several_processes_take_the_place_of_its_own() -> None:
    metrics, other = ServerMetrics("m"), ServerMetrics("m", engine_pid=1)
    for each in (metrics, other):
        each.finished[FinishReason.STOP].inc()
        each.itl.observe(0.5)
    other.ttft.observe(0.2)
    sums = [ours + theirs for ours, theirs in zip(metrics.counts(), other.counts(), strict=True)]
    text = metrics.exposition(sums).decode()
    assert 'vllm:request_success_total{finished_reason="stop",model_name="m"} 2.0' in text
    assert 'vllm:inter_token_latency_seconds_count{model_name="m"} 2.0' in text
    assert 'vllm:time_to_first_token_seconds_count{model_name="m"} 1.0' in text
    assert text.count("process_resident_memory_bytes ") == metrics.exposition().decode().count(
        "process_resident_memory_bytes "
    )
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 1


def test_tokens_are_counted_by_the_names_of_the_tenants_that_have_a_weight() -> None:
    metrics = ServerMetrics("m", tenants=("alice", "other", "alice"))
    for tenant in ("alice", "alice", "bob", "", "other"):
        timer = metrics.start_request(10, 4, tenant=tenant)
        timer.tokens(2, 0.0)
        timer.finish(FinishReason.LENGTH)
    assert value(metrics, "shortfin_llm:tenant_tokens_total", tenant="alice") == 24
    assert value(metrics, "shortfin_llm:tenant_tokens_total", tenant="other") == 36


@pytest.mark.parametrize("state", [True, False])
def test_what_the_probes_say_is_a_gauge(state: bool) -> None:
    metrics = ServerMetrics("m")
    metrics.show_state(lambda: state, lambda: not state)
    assert value(metrics, "shortfin_llm:ready") == state
    assert value(metrics, "shortfin_llm:healthy") == (not state)


def test_a_traced_request_keeps_the_time_of_its_text() -> None:
    now = iter((0.0, 1.0, 1.5, 9.0))
    timer = ServerMetrics("m", lambda: next(now)).start_request(1, 1, is_traced=True)
    with timer.detokenising():
        pass
    assert (timer.detokenise_s, timer.computed) == (0.5, [])
    timer.finish(FinishReason.STOP)
    assert timer.ended_s == 9.0
