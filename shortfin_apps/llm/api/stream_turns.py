"""Turns of the event loop in which every stream that has something new is written."""

from __future__ import annotations

import asyncio
from typing import Protocol

MAX_WORK = 10_000  # of a turn, tokens and what `logprobs_work` counts: some 30 ms


class TurnTaker(Protocol):
    """A stream. Neither method may raise or wait."""

    def convert(self) -> int:
        """Makes of what is new the bytes to send; returns the work that was done, MAX_WORK or little more.

        If something is left, the stream has to be added again.
        """
        ...

    def send(self) -> None: ...


class StreamTurns:
    """Has streams converted one after the other, and then sent, in one callback for the deltas of a step.

    Sends in a row take the kernel a fraction of the time of those with other work in between, where every
    send wakes a receiver that has gone to sleep. When the loop is late, the deltas of several steps are one.

    Clients that read again after a pause may have much to be converted: what is more than MAX_WORK waits for
    the next turn, and other tasks run in between.
    """

    def __init__(self) -> None:
        self._streams: list[TurnTaker] = []

    def add(self, stream: TurnTaker) -> None:
        """Gives the stream a part in the next turn."""
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
