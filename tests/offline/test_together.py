from __future__ import annotations

import asyncio

import pytest

from shortfin_apps.llm.offline.together import together


async def test_all_run_at_once() -> None:
    barrier = asyncio.Barrier(3)

    async def work() -> None:
        await barrier.wait()

    await together(work, 3)
    await together(work, 0)


async def test_the_first_error_ends_the_others_and_is_raised_unchanged() -> None:
    cancelled, error = 0, KeyError("x")
    waiting = iter([False, False, True])

    async def work() -> None:
        nonlocal cancelled
        if next(waiting):
            raise error
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled += 1
            raise

    with pytest.raises(KeyError) as raised:
        await together(work, 3)
    assert raised.value is error
    assert cancelled == 2
