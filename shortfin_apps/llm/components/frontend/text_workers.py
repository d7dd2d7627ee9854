"""Threads for work on texts that would hold the event loop up: few, and apart for very long texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

SHORT_THREADS = 2
LONG_THREADS = 1
LONG_CHARS = 65_536  # from here on, a text takes long enough to keep short ones waiting

P = ParamSpec("P")
T = TypeVar("T")


class TextWorkers:
    """Tokenising and chat templates beside the event loop, so many at once; the others wait in order."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(SHORT_THREADS, thread_name_prefix="text")
        self._long = ThreadPoolExecutor(LONG_THREADS, thread_name_prefix="long text")

    async def run(self, num_chars: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `work` on a text of about that length. Raises what it raises."""
        pool = self._short if num_chars < LONG_CHARS else self._long
        return await asyncio.get_running_loop().run_in_executor(pool, partial(work, *args, **kwargs))
