"""Dumps that callers ask for: one is written at a time, and those who wait for the next one share it."""

from __future__ import annotations

import asyncio

from shortfin_apps.llm.components.recorder.dumps import Dumps, WrittenDump


class JoinedDumps:
    """Writes dumps for callers on an event loop. Each gets one that began after the call.

    So a flood of calls neither occupies the threads that other work needs, nor has its first dumps deleted
    by its last ones before they are read.
    """

    def __init__(self, dumps: Dumps) -> None:
        self._dumps = dumps
        self._writing = asyncio.Lock()
        self._waiting: dict[str, asyncio.Task[WrittenDump]] = {}  # not begun, by reason

    async def write(self, reason: str) -> WrittenDump:
        """Raises DumpError."""
        task = self._waiting.get(reason)
        if task is None:
            task = self._waiting[reason] = asyncio.ensure_future(self._write(reason))
            task.add_done_callback(_retrieve)
        return await asyncio.shield(task)  # a caller who leaves ends it for no other

    async def _write(self, reason: str) -> WrittenDump:
        async with self._writing:
            del self._waiting[reason]
            return await asyncio.to_thread(self._dumps.write, reason)


def _retrieve(task: asyncio.Task[WrittenDump]) -> None:
    """An error is for the callers; without any, asyncio would log it."""
    if not task.cancelled():
        task.exception()
