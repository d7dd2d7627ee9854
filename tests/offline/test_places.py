"""Places against a brute-force model: first come, first served, and never more than there are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.offline.places import Places


class Model:
    """Who has places, and who waits, by number."""

    def __init__(self, total: int) -> None:
        self.total = self.free = total
        self.inside: dict[int, int] = {}
        self.waiting: list[tuple[int, int]] = []

    def come(self, who: int, count: int) -> None:
        self.waiting.append((who, min(count, self.total)))
        self.hand_out()

    def leave(self, who: int) -> None:
        """Also by giving up while waiting."""
        self.waiting = [each for each in self.waiting if each[0] != who]
        self.free += self.inside.pop(who, 0)
        self.hand_out()

    def hand_out(self) -> None:
        while self.waiting and self.waiting[0][1] <= self.free:
            who, count = self.waiting.pop(0)
            self.inside[who] = count
            self.free -= count


Step = tuple[int, bool, bool]  # places or whom, whether one comes, whether the loop runs in between


async def follow(total: int, steps: Sequence[Step]) -> None:
    places, model = Places(total), Model(total)
    inside: set[int] = set()
    tasks: dict[int, asyncio.Task[None]] = {}

    async def stay(who: int, count: int) -> None:
        async with places.taken(count):
            inside.add(who)
            try:
                await asyncio.Event().wait()
            finally:
                inside.discard(who)

    async def settle() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    for number, (value, comes, settles) in enumerate(steps):
        if comes:
            tasks[number] = asyncio.ensure_future(stay(number, value))
            await asyncio.sleep(0)  # it asks
            model.come(number, value)
        elif tasks:
            who = sorted(tasks)[value % len(tasks)]
            tasks.pop(who).cancel()
            model.leave(who)
        if settles:
            await settle()
            assert inside == set(model.inside)
    for task in tasks.values():
        task.cancel()
    await settle()
    assert not inside
    async with asyncio.timeout(1), places.taken(total):  # all are back
        pass


@given(
    total=st.integers(1, 5),
    steps=st.lists(st.tuples(st.integers(1, 7), st.booleans(), st.just(True)), max_size=30),
)
def test_places_are_given_in_order(total: int, steps: list[Step]) -> None:
    asyncio.run(follow(total, steps))


@given(steps=st.lists(st.tuples(st.integers(1, 7), st.booleans(), st.just(False)), max_size=30))
def test_no_place_is_lost_when_many_come_and_go_in_one_turn(steps: list[Step]) -> None:
    asyncio.run(follow(3, steps))


async def test_whoever_was_refused_comes_again_when_another_leaves() -> None:
    places = Places(3)
    async with places.taken(1):
        assert places.are_all_free_but(1)
        async with places.taken(1):
            assert not places.are_all_free_but(1)
            num_left = places.num_left
            waiting = asyncio.ensure_future(places.another_leaves(num_left, 60.0))
            await asyncio.sleep(0)
            assert not waiting.done()
        await waiting
        await places.another_leaves(num_left, 60.0)  # it has left in the meantime


async def test_nobody_is_waited_for_forever() -> None:
    places = Places(1)
    await places.another_leaves(places.num_left, 0.0)
