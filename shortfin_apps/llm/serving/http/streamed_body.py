"""A response body sent in pieces, synchronously where possible, without a turn of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from starlette.types import Message, Send

KEEP_ALIVE = b": keep-alive\n\n"  # a comment in server-sent events; clients skip it


class StreamedBody:
    """Sends pieces with ASGI's `send`; `start`, the message with the status, precedes the first piece.

    `write` runs `send` until it waits. It never waits while the client reads, so `send` may run outside a
    task. Once it waits, the body is held up: `on_held_up` is called, and a task must await `held_up` before
    the next `write`.
    """

    def __init__(self, start: Message, send: Send, on_held_up: Callable[[], None]) -> None:
        self._start = start
        self._send = send
        self._on_held_up = on_held_up
        self._held_up: _Rest | None = None  # the remainder of a `send`
        self._clock = asyncio.get_running_loop().time
        self._has_ended = False
        self.has_begun = False  # whether the status was sent
        self.sent_s = self._clock()  # time of the last send

    @property
    def is_free(self) -> bool:
        """Whether a piece can be written now."""
        return self._held_up is None and not self._has_ended

    def write(self, data: bytes) -> None:
        """Send a piece. The body must be free."""
        assert self.is_free, "the piece before has not been sent"
        self.sent_s = self._clock()
        sending = self._send_piece(data, is_last=False)
        try:
            waits_for = sending.send(None)
        except StopIteration:
            return
        self._held_up = _Rest(sending, waits_for)
        self._on_held_up()

    async def held_up(self) -> None:
        """Wait until a held-up piece is sent."""
        if self._held_up is not None:
            await self._held_up
            self._held_up = None

    async def end(self, data: bytes) -> None:
        """Send the last piece."""
        self._has_ended = True
        await self._send_piece(data, is_last=True)

    def close(self) -> None:
        """Drop a held-up piece. Nothing can be sent afterwards."""
        self._has_ended = True
        if self._held_up is not None:
            self._held_up.close()

    async def _send_piece(self, data: bytes, *, is_last: bool) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self._send(self._start)
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})


class KeepAlive:
    """Sends a comment if nothing was sent for `interval_s`, until it is stopped."""

    def __init__(self, body: StreamedBody, interval_s: float) -> None:
        self._body = body
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(interval_s, self._tick)

    def stop(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        left_s = self._body.sent_s + self._interval_s - self._loop.time()
        if left_s <= 0:
            left_s = self._interval_s
            if self._body.is_free:
                self._body.write(KEEP_ALIVE)
        self._timer = self._loop.call_later(left_s, self._tick)


class _Rest:
    """The remainder of a coroutine that ran outside a task until it had to wait."""

    def __init__(self, coroutine: Coroutine[Any, None, None], waits_for: object) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, None, None]:
        yield self._waits_for
        yield from self._coroutine.__await__()

    def close(self) -> None:
        self._coroutine.close()
