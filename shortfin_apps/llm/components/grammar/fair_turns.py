"""Shares a few places fairly among tenants.

Waiting tenants take turns, in order of arrival, and so do the jobs of one tenant. A tenant with jobs in
progress gets another place only if more places are free than it holds. One tenant therefore fills at most
half of them, and other tenants do not wait for its jobs to finish.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Wait = Callable[[asyncio.Future[None]], Awaitable[None]]


async def endlessly(turn: asyncio.Future[None]) -> None:
    await turn


class FairTurns:
    """Allows `num_places` jobs at once. For one event loop."""

    def __init__(self, num_places: int) -> None:
        self._free = num_places
        self._held: Counter[str] = Counter()  # places by tenant
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # next tenant first

    @asynccontextmanager
    async def place(
        self, tenant: str, timeout_s: float | None, wait: Wait = endlessly
    ) -> AsyncIterator[None]:
        """Holds a place during a block. Raises TimeoutError if none is free within `timeout_s`, if given.

        `wait` awaits a turn that does not come at once; it may cancel the turn, and raise.
        """
        async with asyncio.timeout(timeout_s):
            await self._take(tenant, wait)
        try:
            yield
        finally:
            self._give_back(tenant)

    async def _take(self, tenant: str, wait: Wait) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._hand_out()
        try:
            if not turn.done():
                await wait(turn)
        except BaseException:
            if turn.cancelled():
                self._leave(tenant, turn)
            else:  # cancelled after it had got the place
                self._give_back(tenant)
            raise

    def _give_back(self, tenant: str) -> None:
        self._free += 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self._hand_out()

    def _leave(self, tenant: str, turn: asyncio.Future[None]) -> None:
        if turn in (turns := self._waiting.get(tenant, deque())):
            turns.remove(turn)
            if not turns:
                del self._waiting[tenant]

    def _hand_out(self) -> None:
        """Gives free places to the next tenants in turn."""
        while self._free and (tenant := self._next()) is not None:
            turns = self._waiting.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns  # its next turn comes after the other tenants'
            if not turn.done():  # it may just have been cancelled
                self._free -= 1
                self._held[tenant] += 1
                turn.set_result(None)

    def _next(self) -> str | None:
        return next((tenant for tenant in self._waiting if self._held[tenant] < self._free), None)
