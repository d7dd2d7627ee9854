"""Snapshot requests that the engine's thread has not answered yet."""

from __future__ import annotations

import asyncio

from shortfin_apps.llm.components.engine.snapshot import Snapshot
from shortfin_apps.llm.contract.errors import InvocationError, UnavailableError
from shortfin_apps.llm.serving.frontend.engine_thread import EngineThread, Look


class Looks:
    """Pending snapshot requests. Only the event loop's thread uses this."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self._waiting: set[asyncio.Future[Snapshot | None]] = set()

    async def look(self, after: int) -> Snapshot:
        """Returns a snapshot after the current step. Raises UnavailableError if the thread has ended."""
        if not self._thread.is_alive or self._thread.is_stopping:
            raise _ended()
        answer: asyncio.Future[Snapshot | None] = asyncio.get_running_loop().create_future()
        self._waiting.add(answer)
        self._thread.send(Look(after, lambda snapshot: _give(answer, snapshot)))
        try:
            snapshot = await answer
        finally:
            self._waiting.discard(answer)
        if snapshot is None:
            raise InvocationError("no snapshot of the engine could be taken; the server's log says why")
        return snapshot

    def end(self) -> None:
        """Fails the pending requests: the thread no longer answers them."""
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(_ended())


def _give(answer: asyncio.Future[Snapshot | None], snapshot: Snapshot | None) -> None:
    if not answer.done():  # the caller may have been cancelled
        answer.set_result(snapshot)


def _ended() -> UnavailableError:
    return UnavailableError("there is nothing to see: the engine has ended; restart the server")
