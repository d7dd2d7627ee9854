"""Time to plan a step; reported by pytest-benchmark, not asserted."""

from __future__ import annotations

import itertools

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from shortfin_apps.llm.components.batching import BATCH_MODES, make_mode
from shortfin_apps.llm.components.batching.mode import BatchModeName, BatchSettings
from shortfin_apps.llm.components.batching.scheduler import LOOKAHEAD, Scheduler
from shortfin_apps.llm.components.kvcache import make_cache
from shortfin_apps.llm.components.request.messages import Terms
from shortfin_apps.llm.components.request.request import Request
from tests.components.batching.modes.mode_inputs import ALL_ENTRIES
from tests.components.engine_fixture import call
from tests.components.fake_device import fake_config

NUM_RUNNING, NUM_WAITING = 256, 1000


@pytest.mark.parametrize("mode", list(BATCH_MODES))
def test_256_running_and_1000_waiting(benchmark: BenchmarkFixture, mode: BatchModeName) -> None:
    config = fake_config(stride=16, decode=(1, 32, 256))
    cache = make_cache("trie", 20_000, 16)
    options = BatchSettings(batch_mode=mode, chunk_tokens=128, token_budget=512)
    scheduler = Scheduler(cache, make_mode(options, config, ALL_ENTRIES), NUM_RUNNING)
    for index in range(NUM_RUNNING + NUM_WAITING):
        scheduler.add(Request(call(str(index), [index % 97] * 300)))
    scheduler.plan()
    while len(scheduler.running) < NUM_RUNNING:  # a step looks only at a part of the queue
        finish_prefills(scheduler)
        scheduler.plan()
    finish_prefills(scheduler)
    batch = benchmark(scheduler.plan)
    assert batch is not None
    assert len(scheduler.running) == NUM_RUNNING
    assert len(scheduler.waiting) == NUM_WAITING


@pytest.mark.parametrize("num_tenants", [1, 1000])
def test_1000_waiting_for_pages(benchmark: BenchmarkFixture, num_tenants: int) -> None:
    """More requests may run, but no pages are free: every step looks for a request that fits."""
    config = fake_config(stride=16, decode=(1, 32, 256))
    cache = make_cache("trie", 1 + 256 * 21, 16)
    options = BatchSettings(batch_mode="extend-attention", chunk_tokens=128, token_budget=512)
    scheduler = Scheduler(cache, make_mode(options, config, ALL_ENTRIES), 2 * NUM_RUNNING)
    for index in range(NUM_RUNNING + NUM_WAITING):
        terms = Terms(tenant=str(index % num_tenants))
        scheduler.add(Request(call(str(index), [index] * 300, terms=terms)))
    scheduler.plan()
    while len(scheduler.running) < NUM_RUNNING:
        finish_prefills(scheduler)
        scheduler.plan()
    finish_prefills(scheduler)
    looked_at = list(itertools.islice(scheduler.waiting, LOOKAHEAD))

    def plan_after_pages_came_back() -> object:
        for request in looked_at:  # too few pages for them
            request.blocked_at = None
        return scheduler.plan()

    batch = benchmark(plan_after_pages_came_back)
    assert batch is not None
    assert len(scheduler.waiting) > 0.9 * NUM_WAITING


def finish_prefills(scheduler: Scheduler) -> None:
    for request in scheduler.running:
        if request.num_unplanned > 1:
            request.num_computed = request.num_planned = len(request.token_ids)
            request.token_ids.append(1)
