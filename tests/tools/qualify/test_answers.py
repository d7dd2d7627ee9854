"""Drills notice what a disturbed server keeps, and what it answers afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress

import pytest

from shortfin_apps.llm.offline.local_model import LocalModel
from shortfin_apps.llm.tools.qualify import answers
from shortfin_apps.llm.tools.qualify.bench import Bench, Plan
from shortfin_apps.llm.tools.qualify.outcome import Failed, Fault


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench(Plan("random:tiny", "cpu"))
    yield made
    made.close()


def test_pages_that_stay_leased_are_lost(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "FREE_WITHIN_S", 0.0)
    left: list[asyncio.Task[None]] = []

    async def forget(model: LocalModel) -> str:
        async def hold() -> None:
            async with model.stream(answers.GENERATE, answers._json(answers._long())) as answer:
                await answer.whole()

        left.append(asyncio.create_task(hold()))
        while not model.stats().pages.leased:
            await asyncio.sleep(0)
        return "a request was forgotten"

    with pytest.raises(Failed, match="pages are still leased") as caught:
        answers.drill(forget)(bench)
    assert caught.value.fault is Fault.LOST_PAGES
    for task in left:
        with suppress(RuntimeError):
            task.cancel()


def test_another_answer_afterwards_is_wrong(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    known, found = answers._known_answer, iter(([1, 2], [1, 3]))

    async def changing(model: LocalModel) -> list[int]:
        await known(model)
        return next(found)

    async def nothing(model: LocalModel) -> str:
        return "nothing happened"

    monkeypatch.setattr(answers, "_known_answer", changing)
    with pytest.raises(Failed, match="has another answer") as caught:
        answers.drill(nothing)(bench)
    assert caught.value.figures == {"before": [1, 2], "after": [1, 3]}
