"""The unread output of one request."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from shortfin_apps.llm.components.request.messages import Delta


class DeltaBuffer:
    """A queue that is read as a whole: a late reader gets everything since its last read as one delta.

    It has one reader, in the event loop that puts.
    """

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._filled: asyncio.Future[None] | None = None  # of a reader that waits
        self.num_tokens = 0  # unread

    def put(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self.num_tokens += len(delta.token_ids)
        if self._filled is not None and not self._filled.done():
            self._filled.set_result(None)

    async def get(self) -> Delta:
        """Waits until there is something unread, and returns all of it."""
        while not self._deltas:
            self._filled = asyncio.get_running_loop().create_future()
            await self._filled
        deltas, self._deltas = self._deltas, []
        self.num_tokens = 0
        return deltas[0] if len(deltas) == 1 else _join(deltas)


def _join(deltas: Sequence[Delta]) -> Delta:
    last = deltas[-1]
    return Delta(
        request_id=last.request_id,
        token_ids=tuple(itertools.chain.from_iterable(delta.token_ids for delta in deltas)),
        logprobs=tuple(itertools.chain.from_iterable(delta.logprobs for delta in deltas)),
        num_cached_tokens=max(delta.num_cached_tokens for delta in deltas),
        queue_s=max(delta.queue_s for delta in deltas),
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        error=last.error,
    )
