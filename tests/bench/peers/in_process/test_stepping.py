from __future__ import annotations

from bench.peers.in_process.stepping import EngineThread, Generation, warm_up
from tests.bench.peers.in_process.counting_engine import CountingEngine


async def taken(generation: Generation) -> list[int | Exception]:
    return [await generation.token_ids.get() for _ in range(generation.max_tokens)]


async def test_each_request_gets_its_own_tokens() -> None:
    thread = EngineThread(CountingEngine())
    thread.start()
    generations = [Generation([first], 3) for first in (10, 20, 30)]
    for generation in generations:
        thread.submit(generation)
    assert [await taken(each) for each in generations] == [[11, 12, 13], [21, 22, 23], [31, 32, 33]]
    later = Generation([5], 1)
    thread.submit(later)
    assert await taken(later) == [6]


async def test_an_idle_engine_starts_with_all_requests_that_arrived_together() -> None:
    engine = CountingEngine(quiet_s=0.001)
    thread = EngineThread(engine)
    generations = [Generation([first], 2) for first in range(4)]
    for generation in generations:
        thread.submit(generation)
    thread.start()
    for generation in generations:
        await taken(generation)
    assert engine.batch_sizes == [4, 4]


async def test_a_failure_of_the_engine_reaches_its_requests_and_later_ones() -> None:
    failure = RuntimeError("no memory")
    thread = EngineThread(CountingEngine(fails_with=failure))
    thread.start()
    for _ in range(2):
        generation = Generation([1], 5)
        thread.submit(generation)
        assert await generation.token_ids.get() is failure


def test_a_warm_engine_has_run_batches_and_is_idle() -> None:
    engine = CountingEngine()
    warm_up(engine)
    assert set(engine.batch_sizes) == {1, 3}
    assert not engine.is_busy()
