"""The page's feed: takes snapshots of the engine while there are readers, and passes them to the readers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from shortfin_apps.llm.components.engine.snapshot import Snapshot
from shortfin_apps.llm.contract.errors import LlmError, OverloadedError
from shortfin_apps.llm.serving.api.page.viewer import Viewer
from shortfin_apps.llm.serving.http.streaming import json_line

logger = logging.getLogger(__name__)

MAX_READERS = 8
INTERVAL_S = 0.25
LONGEST_INTERVAL_S = 2.0
RETRY_AFTER_S = 5.0
# Maximum share of the engine's time for snapshots; a snapshot with many pages takes longer, so the interval
# grows with the time it took.
MAX_SHARE = 1 / 250

TakeSnapshot = Callable[[int], Awaitable[Snapshot]]


class Reader:
    """A subscriber of the feed. A slow reader skips all but the newest snapshot."""

    def __init__(self, viewer: Viewer) -> None:
        self._viewer = viewer
        self._newest: Snapshot | None = None
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._has_ended = False

    def offer(self, snapshot: Snapshot) -> None:
        self._newest = snapshot
        self._changed.set()

    def end(self, error: Exception | None = None) -> None:
        """End the feed for this reader; `next` then raises `error`, or returns None without an error."""
        self._has_ended, self._error = True, error
        self._changed.set()

    async def next(self) -> bytes | None:
        """Wait for an unread snapshot; return it as JSON, or None when the feed has ended."""
        await self._changed.wait()
        self._changed.clear()
        if self._has_ended:
            self._changed.set()
            if self._error is not None:
                raise self._error
            return None
        snapshot, self._newest = self._newest, None
        assert snapshot is not None, "it has changed"
        return json_line(self._viewer.view(snapshot))


class Feed:
    """Takes a snapshot every `interval_s`, or less often if snapshots are slow, while there are readers.

    `take`: takes a snapshot with the invocations after a serial number. `is_over`: whether the server stops,
    which ends the feed for all readers.
    """

    def __init__(
        self, take: TakeSnapshot, is_over: Callable[[], bool], interval_s: float = INTERVAL_S
    ) -> None:
        self._take = take
        self._is_over = is_over
        self._interval_s = interval_s
        self._readers: set[Reader] = set()
        self._asking: asyncio.Task[None] | None = None

    @property
    def num_readers(self) -> int:
        return len(self._readers)

    def join(self, viewer: Viewer) -> Reader:
        """Add a reader. Callers must pass it to `leave`. Raises OverloadedError if there are MAX_READERS."""
        if len(self._readers) >= MAX_READERS:
            raise OverloadedError(
                f"{MAX_READERS} pages look at this server, and no more may; close one", RETRY_AFTER_S
            )
        reader = Reader(viewer)
        self._readers.add(reader)
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return reader

    def leave(self, reader: Reader) -> None:
        """Remove a reader; without readers, no snapshots are taken. Removing a reader twice has no effect."""
        self._readers.discard(reader)
        if not self._readers and self._asking is not None:
            self._asking.cancel()
            self._asking = None

    async def _ask(self) -> None:
        last_step = 0
        clock = asyncio.get_running_loop().time
        while not self._is_over():
            began_s = clock()
            try:
                snapshot = await self._take(last_step)
            except Exception as error:
                if not isinstance(error, LlmError):
                    logger.exception("the page's feed failed")
                self._end(error)
                return
            last_step = max((mix.serial for mix in snapshot.invocations), default=last_step)
            for reader in self._readers:
                reader.offer(snapshot)
            await asyncio.sleep(max(0.0, self._pause_s(snapshot) - (clock() - began_s)))
        self._end(None)

    def _pause_s(self, snapshot: Snapshot) -> float:
        return max(self._interval_s, min(snapshot.taken_s / MAX_SHARE, LONGEST_INTERVAL_S))

    def _end(self, error: Exception | None) -> None:
        readers, self._readers = self._readers, set()
        for reader in readers:
            reader.end(error)
