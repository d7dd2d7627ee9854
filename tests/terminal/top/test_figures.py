from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.terminal.top.figures import EntryMix, Pages, figures_of, is_same_process, quantile
from shortfin_apps.llm.terminal.top.reading import parsed
from tests.terminal.top.metered import MeteredServer

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
