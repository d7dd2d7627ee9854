"""Worker threads for slow text processing, which must not block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import ParamSpec, TypeVar

from shortfin_apps.llm.components.grammar.fair_turns import FairTurns, Wait, endlessly

SHORT_THREADS = 2
LONG_THREADS = 1
LONG_CHARS = 65_536  # texts of at least this length have a separate thread: shorter texts do not wait
# One tenant gets at most half of the places, which is enough to keep all threads busy.
SHORT_PLACES = 4 * SHORT_THREADS
LONG_PLACES = 2 * LONG_THREADS

P = ParamSpec("P")
T = TypeVar("T")

current_tenant: ContextVar[str] = ContextVar("current_tenant", default="")
"""The tenant that the current task processes texts for."""

current_wait: ContextVar[Wait] = ContextVar("current_wait", default=endlessly)
"""How the current task waits for a thread; raises to give up, e.g. after the client has disconnected."""


class TextWorkers:
    """A few threads for tokenising and chat templates. Further work waits, and tenants take turns.

    Serves one event loop.
    """

    def __init__(self) -> None:
        self._short = _Threads(SHORT_THREADS, SHORT_PLACES, "text")
        self._long = _Threads(LONG_THREADS, LONG_PLACES, "long text")

    async def run(self, num_chars: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` on a text of about `num_chars` in a thread; return its result or raise its error."""
        threads = self._short if num_chars < LONG_CHARS else self._long
        async with threads.turns.place(current_tenant.get(), None, current_wait.get()):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(threads.pool, partial(work, *args, **kwargs))

    def close(self) -> None:
        """End the threads after their current work."""
        self._short.pool.shutdown()
        self._long.pool.shutdown()


class _Threads:
    def __init__(self, num_threads: int, num_places: int, name: str) -> None:
        self.pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self.turns = FairTurns(num_places)
