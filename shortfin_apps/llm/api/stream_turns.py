"""Turns of the event loop in which every stream that has something new is written."""

from __future__ import annotations

import asyncio
from typing import Protocol


class TurnTaker(Protocol):
    """A stream. Neither method may raise or wait."""

    def convert(self) -> None:
        """Makes of what is new the bytes to send."""
        ...

    def send(self) -> None: ...


class StreamTurns:
    """Has streams converted one after the other, and then sent, in one callback for the deltas of a step.

    Sends in a row take the kernel a fraction of the time of those with other work in between, where every
    send wakes a receiver that has gone to sleep. When the loop is late, the deltas of several steps are one.
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
        for stream in streams:
            stream.convert()
        for stream in streams:
            stream.send()
