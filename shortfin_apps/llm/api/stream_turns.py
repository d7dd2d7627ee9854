"""Writes all streams that have new output in one turn of the event loop."""

from __future__ import annotations

import asyncio
from typing import Protocol


class TurnTaker(Protocol):
    """A stream. Its methods must not raise or wait."""

    def convert(self) -> None:
        """Serialise pending deltas."""
        ...

    def send(self) -> None: ...


class StreamTurns:
    """Converts and then sends all streams with new deltas, in one callback per step of the engine.

    Consecutive sends cost the kernel a fraction of the time of sends with other work in between, each of
    which wakes a sleeping receiver. If the event loop is late, the deltas of several steps are merged.
    """

    def __init__(self) -> None:
        self._streams: list[TurnTaker] = []

    def add(self, stream: TurnTaker) -> None:
        """Include the stream in the next turn."""
        if not self._streams:
            asyncio.get_running_loop().call_soon(self._take_turn)
        self._streams.append(stream)

    def _take_turn(self) -> None:
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.convert()
        for stream in streams:
            stream.send()
