"""The output of one request on its way from the engine to its reader."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence

from shortfin_apps.llm.components.request.messages import Delta


class DeltaStream:
    """A queue of deltas, for one reader; a late reader gets all unread deltas joined into one.

    The reader either iterates, or calls `take` from `on_delta`, which saves an iteration of the event loop.
    Reader and writer must run in the same event loop's thread. `on_close` is called once if the reader closes
    the stream before the last delta was put.
    """

    def __init__(self, on_close: Callable[[], None]) -> None:
        self._on_close = on_close
        self._deltas: list[Delta] = []  # unread
        self._is_complete = False  # the last delta has been put
        self._is_closed = False
        self._filled: asyncio.Future[None] | None = None  # awaited by `__anext__`
        self.on_delta: Callable[[], None] | None = None
        self.num_tokens = 0  # unread

    def put(self, delta: Delta) -> None:
        """Append a delta and notify the reader. Ignored when the stream is closed."""
        self._is_complete = delta.finish_reason is not None
        if self._is_closed:
            return
        self._deltas.append(delta)
        self.num_tokens += len(delta.token_ids)
        self._tell()

    def take(self) -> Delta | None:
        """Return all unread deltas as one, or None if there are none."""
        deltas = self._deltas
        if not deltas:
            return None
        self._deltas = []
        self.num_tokens = 0
        return deltas[0] if len(deltas) == 1 else _join(deltas)

    def close(self) -> None:
        """Drop unread and future deltas. Closing twice is a no-op."""
        if not self._is_closed:
            self._is_closed, self.on_delta = True, None
            self._deltas.clear()
            if not self._is_complete:
                self._on_close()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        """Wait for unread deltas, and return all of them as one."""
        while (delta := self.take()) is None:
            if self._is_complete or self._is_closed:
                raise StopAsyncIteration
            self._filled = asyncio.get_running_loop().create_future()
            await self._filled
        return delta

    def _tell(self) -> None:
        if self.on_delta is not None:
            self.on_delta()
        elif self._filled is not None and not self._filled.done():
            self._filled.set_result(None)


def _join(deltas: Sequence[Delta]) -> Delta:
    last = deltas[-1]
    return Delta(
        request_id=last.request_id,
        token_ids=tuple(itertools.chain.from_iterable(delta.token_ids for delta in deltas)),
        logprobs=tuple(itertools.chain.from_iterable(delta.logprobs for delta in deltas)),
        num_cached_tokens=max(delta.num_cached_tokens for delta in deltas),
        queue_s=max(delta.queue_s for delta in deltas),
        computed=tuple(itertools.chain.from_iterable(delta.computed for delta in deltas)),
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        error=last.error,
        logits=tuple(itertools.chain.from_iterable(delta.logits for delta in deltas)),
    )
