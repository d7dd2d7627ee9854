"""Allots the engine's places in order, so that no request is submitted while there is no room for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Places:
    """As many places as the engine admits sequences; a request takes one for each of its sequences.

    Waiting requests are served in order of arrival, so that a request with many sequences is not overtaken
    forever. For one event loop.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = total
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._next_leaves: asyncio.Future[None] | None = None
        self.num_left = 0  # requests that have returned their places so far

    @asynccontextmanager
    async def taken(self, count: int) -> AsyncIterator[None]:
        """Hold `count` places, or all if there are fewer, during the context."""
        count = min(count, self.total)
        await self._take(count)
        try:
            yield
        finally:
            self._give_back(count)

    def are_all_free_but(self, count: int) -> bool:
        """Whether all places are free, except for the `count` of one request."""
        return self._free + min(count, self.total) >= self.total

    async def another_leaves(self, num_left: int, timeout_s: float) -> None:
        """Wait until more than `num_left` requests have left, or for `timeout_s`."""
        if self.num_left > num_left:
            return
        if self._next_leaves is None:
            self._next_leaves = asyncio.get_running_loop().create_future()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._next_leaves)

    async def _take(self, count: int) -> None:
        if not self._waiting and count <= self._free:
            self._free -= count
            return
        entry = (count, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        try:
            await entry[1]
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
                self._hand_out()  # it may have blocked later requests
            elif not entry[1].cancelled():  # it was given places in the same turn of the loop
                self._give_back(count)
            raise

    def _give_back(self, count: int) -> None:
        self._free += count
        self.num_left += 1
        if self._next_leaves is not None:
            self._next_leaves.set_result(None)
            self._next_leaves = None
        self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting and (self._waiting[0][1].done() or self._waiting[0][0] <= self._free):
            count, place = self._waiting.popleft()
            if not place.done():
                self._free -= count
                place.set_result(None)
