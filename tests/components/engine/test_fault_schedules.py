"""10,000 fault schedules: no request is lost and no page leaks.

`pytest tests/components/engine/test_fault_schedules.py --fault-seed 1234` repeats one of them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter

import pytest

from shortfin_apps.llm.contract.errors import OverloadedError
from shortfin_apps.llm.serving.frontend.async_engine import AsyncEngine
from tests.components.fault_schedule import Client, Invoked, Schedule, random_arrival, random_rig
from tests.matrices import slow_but

NUM_SCHEDULES, PER_TEST = 10_000, 250
NUM_QUICK = 500
NUM_THREADED, PATIENCE_S = 300, 60


def run_all(seeds: range) -> Counter[str]:
    """Runs them and counts preemptions, and rows that need no draw; errors name their seed."""
    # Logging thousands of expected errors with their tracebacks takes longer than the schedules.
    logging.disable(logging.CRITICAL)
    try:
        return sum((run_one(seed) for seed in seeds), Counter[str]())
    finally:
        logging.disable(logging.NOTSET)


def run_one(seed: int) -> Counter[str]:
    schedule = Schedule(seed)
    try:
        schedule.run()
    except BaseException as error:
        error.add_note(f"to repeat it: --fault-seed {seed}")
        raise
    preemptions, without_draw = schedule.rig.scheduler.num_preemptions, schedule.invoked.num_without_draw
    return Counter(preemptions=preemptions, without_draw=without_draw)


FIRSTS = range(0, NUM_SCHEDULES, PER_TEST)


@pytest.mark.parametrize("first", slow_but(range(0, NUM_QUICK, PER_TEST), FIRSTS))
def test_nothing_is_lost_and_nothing_leaks(first: int, fault_seed: int | None) -> None:
    if fault_seed is not None:
        if first:
            pytest.skip("one test repeats the schedule")
        run_one(fault_seed)
        return
    counts = run_all(range(first, first + PER_TEST))
    assert counts["preemptions"] > PER_TEST / 50, "the pools are too large to find anything"
    assert counts["without_draw"] > PER_TEST, "hardly a token is forced"


def test_a_seed_is_one_schedule() -> None:
    once, again = Schedule(3), Schedule(3)
    once.run()
    again.run()
    assert [repr(client.deltas) for client in once.clients] == [repr(c.deltas) for c in again.clients]


class FaultyDevice:
    """A device whose calls fail at random, in the engine's own thread."""

    def __init__(self, rng: random.Random) -> None:
        self.hit: set[str] = set()
        self.rig = random_rig(rng, time.monotonic)
        self.rig.program.faults.call = self._on_call
        self._rng = random.Random(rng.random())
        self._rate = rng.choice([0.0, 0.01, 0.05])
        self._invoked = Invoked(self.rig.engine)

    def _on_call(self, name: str) -> None:
        if self._rng.random() < self._rate:
            self.hit.update(self._invoked.request_ids)
            raise RuntimeError(f"broken in {name}")


async def run_threaded(seed: int) -> None:
    rng = random.Random(seed)
    device = FaultyDevice(rng)
    engine = AsyncEngine(device.rig.engine, max_requests=8)
    engine.start()
    clients: list[Client] = []
    for number in range(rng.randint(1, 20)):
        try:
            clients.append(Client(engine, *random_arrival(rng, str(number)), is_slow=False))
        except OverloadedError:
            await asyncio.sleep(0)
        if rng.random() < 0.3:
            rng.choice(clients).leave()
        if rng.random() < 0.1:
            engine.abort(rng.choice(clients).request_id)
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
    while not all(client.task.done() for client in clients):
        await asyncio.wait([client.task for client in clients])
    await engine.drain(20)
    assert await engine.close()
    for client in clients:
        client.check(client.request_id in device.hit, was_away=False)
    while device.rig.engine.has_work:  # steps that were in flight
        device.rig.engine.step()
    device.rig.cache.check_integrity()
    assert device.rig.cache.usage().leased == 0
    assert device.rig.all_pages_back()


async def test_nothing_leaks_with_the_engines_own_thread() -> None:
    """Requests are drawn from the seed; how the two threads interleave is not, so no run is repeatable."""
    logging.disable(logging.CRITICAL)
    try:
        for seed in range(NUM_THREADED):
            async with asyncio.timeout(PATIENCE_S):
                await run_threaded(seed)
    finally:
        logging.disable(logging.NOTSET)
