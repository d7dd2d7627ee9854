"""Shares a few places, each of which allows one job to run, fairly among tenants.

Waiting tenants take turns (round robin); the jobs of one tenant run in order of arrival. A tenant with jobs
in progress gets another place only if more places are free than the tenant holds. One tenant therefore fills
at most half of the places (rounded up), and other tenants do not wait for that tenant's jobs to finish.
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
    """Allows `num_places` jobs at once. Callers must use one event loop."""

    def __init__(self, num_places: int) -> None:
        self._free = num_places
        self._held: Counter[str] = Counter()  # places by tenant
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # next tenant first

    @asynccontextmanager
    async def place(
        self, tenant: str, timeout_s: float | None, wait: Wait = endlessly
    ) -> AsyncIterator[None]:
        """Hold a place during a block. Raises TimeoutError if the tenant gets no place within `timeout_s`.

        `timeout_s` None means no limit. If no place can be had at once, `wait` is called to await the turn;
        `wait` may also cancel the turn and raise.
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
            else:  # the wait was cancelled after the turn had got a place
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
        """Give free places to the next tenants in turn."""
        while self._free and (tenant := self._next()) is not None:
            turns = self._waiting.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns  # its next turn comes after the other tenants'
            if not turn.done():  # a done turn has just been cancelled
                self._free -= 1
                self._held[tenant] += 1
                turn.set_result(None)

    def _next(self) -> str | None:
        return next((tenant for tenant in self._waiting if self._held[tenant] < self._free), None)
