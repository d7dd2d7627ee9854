"""How long planning a step takes; reported by pytest-benchmark, not asserted."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from shortfin_apps.llm.components.batching import BATCH_MODES, BatchOptions, make_mode
from shortfin_apps.llm.components.batching.scheduler import Scheduler
from shortfin_apps.llm.components.kvcache import make_cache
from shortfin_apps.llm.components.request import Request
from tests.components.engine_fixture import call
from tests.components.fake_device import fake_config

NUM_RUNNING, NUM_WAITING = 256, 1000


@pytest.mark.parametrize("mode", list(BATCH_MODES))
def test_256_running_and_1000_waiting(benchmark: BenchmarkFixture, mode: str) -> None:
    config = fake_config(stride=16, decode=(1, 32, 256))
    cache = make_cache("trie", 20_000, 16)
    options = BatchOptions(chunk_tokens=128, token_budget=512)
    scheduler = Scheduler(cache, make_mode(mode, config, options), NUM_RUNNING)
    for index in range(NUM_RUNNING + NUM_WAITING):
        scheduler.add(Request(call(str(index), [index % 97] * 300)))
    scheduler.plan()
    while len(scheduler.running) < NUM_RUNNING:  # each step looks at a part of the queue only
        finish_prefills(scheduler)
        scheduler.plan()
    finish_prefills(scheduler)
    batch = benchmark(scheduler.plan)
    assert batch is not None
    assert len(scheduler.running) == NUM_RUNNING
    assert len(scheduler.waiting) == NUM_WAITING


def finish_prefills(scheduler: Scheduler) -> None:
    for request in scheduler.running:
        if request.num_uncomputed > 1:
            request.num_computed = len(request.tokens)
            request.tokens.append(1)
