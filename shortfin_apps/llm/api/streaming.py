"""Server-sent events, and clients that leave before the answer is whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shortfin_apps.llm.components.frontend.text_stream import TextStream, close_all
from shortfin_apps.llm.errors import RequestAbortedError

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def event(data: object) -> bytes:
    """One server-sent event with a JSON payload."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves (then RequestAbortedError).

    The request's body must have been read. Starlette itself cancels only streaming responses.
    """
    return await _race(request.receive, work)


class EventStream(Response):
    """Sends `events` as they come; whatever happens, `streams`, which feed them, are closed at the end.

    `events` tells errors as an event of its own: the header has long been sent.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], streams: Sequence[TextStream]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _race(receive, self._send(send))
        except (RequestAbortedError, OSError):
            pass  # the client has left; nobody is there to be told
        finally:
            await self._events.aclose()
            await close_all(self._streams)  # `events` may never have been started

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._events:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _race(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise RequestAbortedError("the client closed the connection")
    finally:
        for unfinished in (task, watcher):
            unfinished.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
