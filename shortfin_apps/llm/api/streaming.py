"""Server-sent events, and cancellation when a client disconnects before its answer is complete."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shortfin_apps.llm.api.access_log import access_of
from shortfin_apps.llm.api.errors import answer_to, error_body, is_native
from shortfin_apps.llm.api.service import service_of
from shortfin_apps.llm.components.frontend.text_stream import TextStream, close_all
from shortfin_apps.llm.errors import LlmError, RequestAbortedError

logger = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients skip


def event(data: object) -> bytes:
    """One server-sent event with a JSON payload."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it and raises RequestAbortedError when the client disconnects.

    The request's body must have been read. Starlette itself cancels only streaming responses.
    """
    return await _race(request.receive, work)


class EventStream(Response):
    """Sends each of `events`, JSON objects, as it comes, then `[DONE]`; closes `streams` at the end.

    `streams` are what `events` reads from. The status is sent with the first event: an error before it is
    raised, so that it is answered with its own status, and a router may send the request to another server;
    a later error is the last event. When nothing was sent for `Service.stream_keep_alive_s`, a comment is,
    after the status if need be, so that no proxy closes the connection.
    """

    media_type = "text/event-stream"

    def __init__(
        self, request: Request, events: AsyncGenerator[dict[str, Any], None], streams: Sequence[TextStream]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._request = request
        self._events = events
        self._streams = streams
        self._has_begun = False  # the status is sent
        self._sent_s = 0.0  # when something was last sent, on the event loop's clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _race(receive, self._send(send))
        except (RequestAbortedError, OSError):
            if not self._has_begun:
                raise
            # the client has disconnected
        finally:
            await self._events.aclose()
            await close_all(self._streams)  # `events` may never have been started

    async def _send(self, send: Send) -> None:
        keep_alive_s = service_of(self._request).stream_keep_alive_s
        ticking = asyncio.ensure_future(self._keep_alive(send, keep_alive_s)) if keep_alive_s else None
        try:
            async for data in self._events:
                await self._write(send, event(data))
        except Exception as error:
            if not self._has_begun:
                raise
            await self._write(send, self._last_words(error))
        finally:
            if ticking is not None:
                ticking.cancel()
        await self._write(send, DONE, is_last=True)

    async def _keep_alive(self, send: Send, interval_s: float) -> None:
        clock = asyncio.get_running_loop().time
        self._sent_s = clock()
        while True:
            left_s = self._sent_s + interval_s - clock()
            if left_s > 0:
                await asyncio.sleep(left_s)
            else:
                await self._write(send, KEEP_ALIVE)

    async def _write(self, send: Send, data: bytes, *, is_last: bool = False) -> None:
        self._sent_s = asyncio.get_running_loop().time()
        if not self._has_begun:
            self._has_begun = True
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
        await send({"type": "http.response.body", "body": data, "more_body": not is_last})

    def _last_words(self, error: Exception) -> bytes:
        if not isinstance(error, LlmError):
            logger.error("a stream failed", exc_info=error)
        access_of(self._request).error = answer_to(error).code
        return event(error_body(error, native=is_native(self._request)))


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
