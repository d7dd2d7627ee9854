"""Writes all streams that have new output in one turn of the event loop."""

from __future__ import annotations

import asyncio
from typing import Protocol

MAX_WORK = 10_000  # of a turn, tokens and what `logprobs_work` counts: some 30 ms


class TurnTaker(Protocol):
    """A stream. Its methods must not raise or wait."""

    def convert(self) -> int:
        """Serialise pending deltas, and return the work done, at most little more than MAX_WORK.

        A stream with deltas left has to be added again.
        """
        ...

    def send(self) -> None: ...


class StreamTurns:
    """Converts and then sends all streams with new deltas, in one callback per step of the engine.

    Consecutive sends cost the kernel a fraction of the time of sends with other work in between, each of
    which wakes a sleeping receiver. If the event loop is late, the deltas of several steps are merged.

    A client that reads again after a pause may have many pending deltas. The work beyond MAX_WORK waits for
    the next turn, and other tasks run in between.

    A stream that has sent nothing for `keep_alive_s` sends a comment; None: it does not.
    """

    def __init__(self, keep_alive_s: float | None = None) -> None:
        self.keep_alive_s = keep_alive_s
        self._streams: list[TurnTaker] = []

    def add(self, stream: TurnTaker) -> None:
        """Include the stream in the next turn."""
        if not self._streams:
            asyncio.get_running_loop().call_soon(self._take_turn)
        self._streams.append(stream)

    def _take_turn(self) -> None:
        streams, self._streams = self._streams, []
        work = num_converted = 0
        while num_converted < len(streams) and work < MAX_WORK:
            work += streams[num_converted].convert()
            num_converted += 1
        for stream in streams[:num_converted]:
            stream.send()
        for stream in streams[num_converted:]:
            self.add(stream)
