from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shortfin_apps.llm.components.grammar.fair_turns import FairTurns

NEVER_S = 1e3


class Jobs:
    """Jobs that hold a place until they are told to end; `started` has their names in order."""

    def __init__(self, num_places: int) -> None:
        self.turns = FairTurns(num_places)
        self.started: list[str] = []
        self.running: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def add(self, *names: str) -> None:
        """A job's first letter is its tenant."""
        for name in names:
            self.tasks[name] = asyncio.create_task(self._run(name))
        await settle()

    async def end(self, name: str) -> None:
        self.running[name].set()
        await settle()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await settle()

    async def _run(self, name: str) -> None:
        async with self.turns.place(name[0], NEVER_S):
            self.started.append(name)
            self.running[name] = asyncio.Event()
            try:
                await self.running[name].wait()
            finally:
                del self.running[name]

    def is_empty(self) -> bool:
        return not self.turns._waiting and not self.turns._held


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_who_leaves_waits_no_more() -> None:
    jobs = Jobs(1)
    await jobs.add("a0", "b0", "b1", "c0")
    await jobs.cancel("b0")
    await jobs.cancel("c0")
    assert {tenant: len(turns) for tenant, turns in jobs.turns._waiting.items()} == {"b": 1}
    await jobs.end("a0")
    assert jobs.started == ["a0", "b1"]
    await jobs.end("b1")
    assert jobs.is_empty()


async def test_one_tenant_leaves_places_to_others() -> None:
    jobs = Jobs(4)
    await jobs.add(*(f"a{i}" for i in range(24)))
    assert jobs.started == ["a0", "a1"]
    await jobs.add("b0", "b1", "c0")
    assert jobs.started == ["a0", "a1", "b0", "c0"]


async def test_waiting_tenants_take_turns() -> None:
    jobs = Jobs(1)
    await jobs.add("a0", "a1", "a2", "a3", "b0", "b1", "c0")
    for _ in range(6):
        await jobs.end(jobs.started[-1])
    assert jobs.started == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]


async def test_one_that_leaves_gives_up_its_place_and_its_turn() -> None:
    jobs = Jobs(1)
    await jobs.add("a0", "b0", "c0")
    await jobs.cancel("b0")
    await jobs.cancel("a0")
    assert jobs.started == ["a0", "c0"]
    await jobs.end("c0")
    assert jobs.is_empty()


async def test_one_that_is_cancelled_as_its_turn_comes_passes_it_on() -> None:
    jobs = Jobs(1)
    await jobs.add("a0", "b0", "c0")
    jobs.running["a0"].set()
    while jobs.running:  # until b has the place, which it does not know
        await asyncio.sleep(0)
    await jobs.cancel("b0")
    assert jobs.started == ["a0", "c0"]


async def test_who_waits_may_give_up() -> None:
    async def give_up(turn: asyncio.Future[None]) -> None:
        turn.cancel()
        raise ValueError("gave up")

    jobs = Jobs(1)
    async with jobs.turns.place("a", NEVER_S, give_up):  # there is no need to wait
        with pytest.raises(ValueError, match="gave up"):
            async with jobs.turns.place("b", NEVER_S, give_up):
                pass
    assert jobs.is_empty()


async def test_a_wait_has_an_end() -> None:
    jobs = Jobs(1)
    await jobs.add("a0")
    with pytest.raises(TimeoutError):
        async with jobs.turns.place("b", 0):
            pass
    await jobs.end("a0")
    assert jobs.is_empty()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.sampled_from(["add", "end", "cancel"]), st.integers(0, 99)), max_size=40),
)
def test_no_place_is_lost_and_none_is_idle(num_places: int, steps: list[tuple[str, int]]) -> None:
    asyncio.run(_schedule(num_places, steps))


async def _schedule(num_places: int, steps: list[tuple[str, int]]) -> None:
    jobs = Jobs(num_places)
    for number, (step, choice) in enumerate(steps):
        unfinished = [name for name, task in jobs.tasks.items() if not task.done()]
        if step == "add":
            await jobs.add(f"{'abc'[choice % 3]}{number}")
        elif step == "end" and jobs.running:
            await jobs.end(sorted(jobs.running)[choice % len(jobs.running)])
        elif step == "cancel" and unfinished:
            await jobs.cancel(unfinished[choice % len(unfinished)])
        _check(jobs, num_places)
    for task in jobs.tasks.values():
        task.cancel()
    await settle()
    assert jobs.is_empty()
    assert jobs.turns._free == num_places


def _check(jobs: Jobs, num_places: int) -> None:
    held = Counter(name[0] for name in jobs.running)
    assert sum(held.values()) <= num_places
    waiting = {name[0] for name, task in jobs.tasks.items() if not task.done() and name not in jobs.running}
    assert all(held[tenant] >= num_places - sum(held.values()) for tenant in waiting)
