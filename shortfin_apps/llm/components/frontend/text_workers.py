"""Worker threads for slow work on texts, so that it does not block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

SHORT_THREADS = 2
LONG_THREADS = 1
LONG_CHARS = 65_536  # such texts have their own thread, so that short ones do not wait for them

P = ParamSpec("P")
T = TypeVar("T")


class TextWorkers:
    """A few threads for tokenising and chat templates; further work waits in order."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(SHORT_THREADS, thread_name_prefix="text")
        self._long = ThreadPoolExecutor(LONG_THREADS, thread_name_prefix="long text")

    async def run(self, num_chars: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `work` on a text of about `num_chars` in a thread; returns its result or raises its error."""
        pool = self._short if num_chars < LONG_CHARS else self._long
        return await asyncio.get_running_loop().run_in_executor(pool, partial(work, *args, **kwargs))

    def close(self) -> None:
        """Ends the threads, after the work under way."""
        self._short.shutdown()
        self._long.shutdown()
