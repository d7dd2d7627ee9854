from __future__ import annotations

import asyncio
import threading

import pytest

from shortfin_apps.llm.serving.frontend.text_workers import (
    LONG_CHARS,
    LONG_PLACES,
    LONG_THREADS,
    SHORT_PLACES,
    SHORT_THREADS,
    TextWorkers,
    current_tenant,
)

PATIENCE_S = 30


@pytest.mark.parametrize(("num_chars", "threads"), [(1, SHORT_THREADS), (LONG_CHARS, LONG_THREADS)])
async def test_work_beyond_the_threads_waits(num_chars: int, threads: int) -> None:
    workers, gate, started = TextWorkers(), threading.Event(), threading.Semaphore(0)
    running: list[int] = []
    most = 0

    def work(number: int) -> int:
        nonlocal most
        running.append(number)
        most = max(most, len(running))
        started.release()
        assert gate.wait(PATIENCE_S)
        running.remove(number)
        return number

    tasks = [asyncio.create_task(workers.run(num_chars, work, number)) for number in range(12)]
    await asyncio.sleep(0)
    for _ in range(threads):
        assert await asyncio.to_thread(started.acquire, timeout=PATIENCE_S)
    assert len(running) == threads
    gate.set()
    assert await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S) == list(range(12))
    assert most == threads


async def test_short_texts_do_not_wait_for_long_ones() -> None:
    workers, gate = TextWorkers(), threading.Event()
    long = [asyncio.create_task(workers.run(LONG_CHARS, gate.wait, PATIENCE_S)) for _ in range(8)]
    try:
        assert await asyncio.wait_for(workers.run(10, len, "abc"), PATIENCE_S) == 3
        assert not any(task.done() for task in long)
    finally:
        gate.set()
        await asyncio.gather(*long)


@pytest.mark.parametrize(("num_chars", "places"), [(1, SHORT_PLACES), (LONG_CHARS, LONG_PLACES)])
async def test_tenants_take_turns(num_chars: int, places: int) -> None:
    workers, gate, order = TextWorkers(), threading.Event(), list[str]()

    def work(tenant: str) -> None:
        assert gate.wait(PATIENCE_S)
        order.append(tenant)

    async def ask(tenant: str) -> None:
        current_tenant.set(tenant)
        await workers.run(num_chars, work, tenant)

    tasks = [asyncio.create_task(ask(tenant)) for tenant in ["a"] * 20 + ["b"]]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
    assert order.index("b") <= places // 2 + 1


async def test_errors_are_raised_to_the_caller() -> None:
    with pytest.raises(ValueError, match="x"):
        await asyncio.wait_for(TextWorkers().run(1, int, "x"), PATIENCE_S)


async def test_closing_ends_the_threads() -> None:
    before = set(threading.enumerate())
    workers = TextWorkers()
    assert [await workers.run(num_chars, str, 7) for num_chars in (1, LONG_CHARS)] == ["7", "7"]
    workers.close()
    assert set(threading.enumerate()) <= before
