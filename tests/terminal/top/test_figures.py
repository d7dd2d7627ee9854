from __future__ import annotations

import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import PlainTextResponse

from shortfin_apps.llm.client import LlmClient, ServerError
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.terminal.top.figures import (
    EntryMix,
    Pages,
    WatchedServer,
    figures_of,
    is_same_process,
    parsed,
    quantile,
)
from tests.scripted_server import ScriptedServer, says
from tests.terminal.top.metered import INFO, MeteredServer

TEXT = """\
# TYPE a counter
a_total{x="1",y="p"} 2.0
a_total{x="1",y="q"} 3.0
a_total{x="2",y="q"} 4.0
# TYPE h histogram
h_bucket{le="0.5",m="one"} 1
h_bucket{le="+Inf",m="one"} 2
h_bucket{le="0.5",m="two"} 1
h_bucket{le="+Inf",m="two"} 1
"""

NO_FIGURES = ("a NaN", "a +Inf", "a -Inf", "a 1e300", 'h_bucket{le="x"} 1', 'h_bucket{le="NaN"} 1')


def test_samples_are_summed_over_the_labels_that_are_left_open() -> None:
    reading = parsed(TEXT, 1.0)
    assert reading.total("a_total") == 9
    assert reading.total("a_total", x="1") == 5
    assert reading.total("a_total", x="3") is None
    assert reading.total("b") is None
    assert reading.by_label("a_total", "y") == {"p": 2, "q": 7}
    assert reading.buckets("h") == {0.5: 2, math.inf: 3}


@pytest.mark.parametrize("line", NO_FIGURES)
def test_a_metric_with_a_sample_that_is_no_figure_is_left_out(line: str) -> None:
    name = line[0].replace("h", "h_bucket")
    reading = parsed(f'{TEXT}# TYPE a gauge\na{{x="1"}} 1\n{line}\nb 2\n', 0.0)
    assert reading.total(name) is None
    assert reading.total("b") == 2


@pytest.mark.parametrize("text", ["<html>", '{"error": 1}', "a{x= 1", "a b c d"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ServerError, match="Prometheus"):
        parsed(text, 0.0)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(ServerError):
        parsed(text, 0.0)


BOUNDS = (0.001, 0.01, 0.1, 1.0, math.inf)


def test_figures_are_those_of_the_interval() -> None:
    server = MeteredServer()
    server.work(1.0)
    before = server.reading()
    server.work(2.0)
    figures = figures_of(before, server.reading())
    assert figures.seconds == 2.0
    assert (figures.tokens_in_per_s, figures.tokens_out_per_s, figures.cached_share) == (200, 25, 0.25)
    assert (figures.running, figures.waiting, figures.preemptions) == (3, 4, 2)
    assert (figures.finished, figures.refused) == ({"stop": 4}, {"queue_full": 1})
    assert figures.busy_share == 0.5
    assert figures.pages == Pages(total=100, used=50, cached=20, free=30)
    assert figures.window_pages is None
    assert figures.entries == (
        EntryMix("prefill_bs4", 0.5, 2.0, 150.0, 0.0, 84 / 384),
        EntryMix("decode_bs4", 1.0, 2.5, 0.0, 2.5, 3 / 8),
    )
    # three of four in (10 ms, 20 ms], one in (100 ms, 250 ms]; all gaps in (1 ms, 2.5 ms]
    assert figures.ttft_ms_p50 == pytest.approx(10 + 10 * 2 / 3)
    assert figures.ttft_ms_p99 == pytest.approx(100 + 150 * 0.96)
    assert figures.itl_ms_p50 == pytest.approx(1.75)


def test_an_idle_interval_has_no_latencies() -> None:
    server = MeteredServer()
    server.work(1.0)
    before = server.reading()
    server.clock.now_s += 1.0
    figures = figures_of(before, server.reading())
    assert (figures.tokens_in_per_s, figures.ttft_ms_p50, figures.itl_ms_p99) == (0, None, None)
    assert (figures.cached_share, figures.finished, figures.entries) == (None, {}, ())


def test_one_reading_has_only_the_state() -> None:
    server = MeteredServer()
    server.work(1.0)
    figures = figures_of(None, server.reading())
    assert (figures.running, figures.pages) == (3, Pages(100, 50, 20, 30))
    assert (figures.seconds, figures.tokens_in_per_s, figures.preemptions, figures.finished) == (
        *(None, None, None),
        {},
    )


def test_a_server_without_these_metrics_has_no_figures() -> None:
    figures = figures_of(parsed("", 0.0), parsed("up 1\n", 1.0))
    assert (figures.running, figures.tokens_out_per_s, figures.pages, figures.busy_share) == (None,) * 4


def test_what_is_first_counted_within_the_interval_counts() -> None:
    """As the engine's counters do once the model is loaded."""
    server = MeteredServer()
    server.work(1.0)
    assert figures_of(parsed("", 0.0), server.reading()).tokens_out_per_s == 50


@pytest.mark.parametrize("count", ["0.4", "-1", "0"])
def test_an_entry_that_was_not_invoked_is_left_out(count: str) -> None:
    name = 'shortfin_llm:invocations_total{entry="a"}'
    assert figures_of(parsed(f"{name} 0\n", 0.0), parsed(f"{name} {count}\n", 1.0)).entries == ()


def test_a_restart_is_noticed() -> None:
    old, new = MeteredServer(), MeteredServer()
    old.work(1.0)
    assert is_same_process(old.reading(), old.reading())
    assert not is_same_process(old.reading(), new.reading())
    first = parsed("process_start_time_seconds 1\n", 0.0)
    assert not is_same_process(first, parsed("process_start_time_seconds 2\n", 0.0))


@given(st.lists(st.integers(0, 20), min_size=5, max_size=5), st.floats(0, 1))
def test_a_quantile_lies_in_the_bucket_of_its_value(counts: list[int], share: float) -> None:
    cumulative = {bound: float(sum(counts[: i + 1])) for i, bound in enumerate(BOUNDS)}
    found = quantile(cumulative, share)
    if not sum(counts):
        assert found is None
        return
    assert found is not None
    values = [bound for bound, count in zip(BOUNDS, counts, strict=True) for _ in range(count)]
    of_value = values[max(0, math.ceil(share * len(values) - 1e-9) - 1)]
    place = BOUNDS.index(of_value)
    lower = BOUNDS[place - 1] if place else 0.0
    assert lower * (1 - 1e-6) <= found <= min(of_value, 1.0) * (1 + 1e-6)


async def test_figures_are_those_since_the_last_reading(server: ScriptedServer) -> None:
    metered = MeteredServer()
    first = metered.answer()
    metered.work(2.0)
    server.on("/metrics", first, metered.answer())
    server.on("/server_info", says(INFO))
    times = iter((10.0, 12.0))
    async with LlmClient(server.url, "key") as client:
        watched = WatchedServer(client, times.__next__)
        assert (await watched.read()).tokens_out_per_s is None
        assert (await watched.read()).tokens_out_per_s == 25
        assert watched.info == INFO
    assert {seen.headers["authorization"] for seen in server.seen} == {"Bearer key"}
    assert [seen.path for seen in server.seen] == ["/metrics", "/server_info", "/metrics"]


async def test_after_a_restart_it_begins_anew(server: ScriptedServer) -> None:
    old, new = MeteredServer(), MeteredServer()
    old.work(2.0)
    server.on("/metrics", old.answer(), new.answer())
    server.on("/server_info", says(INFO), says({**INFO, "version": "2"}))
    async with LlmClient(server.url) as client:
        watched = WatchedServer(client)
        await watched.read()
        assert (await watched.read()).tokens_out_per_s is None
        assert watched.info["version"] == "2"


async def test_another_server_needs_no_server_info(server: ScriptedServer) -> None:
    server.on("/metrics", lambda _, __: PlainTextResponse("vllm:num_requests_running 3\n"))
    async with LlmClient(server.url) as client:
        watched = WatchedServer(client)
        assert (await watched.read()).running == 3
        assert watched.info == {}


async def test_a_server_without_metrics_cannot_be_watched(server: ScriptedServer) -> None:
    async with LlmClient(server.url) as client:
        with pytest.raises(InvalidRequestError, match=r"has no /metrics to watch \(Not Found\)"):
            await WatchedServer(client).read()


async def test_other_texts_than_metrics_are_refused(server: ScriptedServer) -> None:
    server.on("/metrics", lambda _, __: PlainTextResponse("<html>"))
    async with LlmClient(server.url) as client:
        with pytest.raises(ServerError):
            await WatchedServer(client).read()
