"""Dumps on request: one is written at a time, and callers that wait for the next one share it."""

from __future__ import annotations

import asyncio

from shortfin_apps.llm.components.recorder.dumps import Dumps, WrittenDump


class JoinedDumps:
    """Writes dumps for callers on an event loop. Each caller gets a dump that started after its call.

    This way a flood of calls neither occupies the threads that other work needs, nor deletes its first dumps
    before they are read.
    """

    def __init__(self, dumps: Dumps) -> None:
        self._dumps = dumps
        self._writing = asyncio.Lock()
        self._waiting: dict[str, asyncio.Task[WrittenDump]] = {}  # not started yet, by reason

    async def write(self, reason: str) -> WrittenDump:
        """Writes a dump, or joins one that waits to be written. Raises DumpError."""
        task = self._waiting.get(reason)
        if task is None:
            task = self._waiting[reason] = asyncio.ensure_future(self._write(reason))
            task.add_done_callback(_retrieve)
        return await asyncio.shield(task)  # cancelling one caller must not cancel the dump for others

    async def _write(self, reason: str) -> WrittenDump:
        async with self._writing:
            del self._waiting[reason]
            return await asyncio.to_thread(self._dumps.write, reason)


def _retrieve(task: asyncio.Task[WrittenDump]) -> None:
    """Retrieves the task's error: callers get it from the task; unretrieved, asyncio would log it."""
    if not task.cancelled():
        task.exception()
