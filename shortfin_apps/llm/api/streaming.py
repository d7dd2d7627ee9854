"""Server-sent events, and cancellation when a client disconnects before its answer is complete."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shortfin_apps.llm.api.access_log import access_of
from shortfin_apps.llm.api.errors import answer_to, error_body, is_native
from shortfin_apps.llm.components.frontend.text_stream import TextStream, close_all
from shortfin_apps.llm.errors import LlmError, RequestAbortedError

logger = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


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

    `streams` are what `events` reads from. An error is sent as the last event, as the response has begun.
    """

    media_type = "text/event-stream"

    def __init__(
        self, request: Request, events: AsyncGenerator[dict[str, Any], None], streams: Sequence[TextStream]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks = _encoded(request, events)
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _race(receive, self._send(send))
        except (RequestAbortedError, OSError):
            pass  # the client has disconnected
        finally:
            await self._chunks.aclose()
            await close_all(self._streams)  # `events` may never have been started

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _encoded(
    request: Request, events: AsyncGenerator[dict[str, Any], None]
) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(events):
            async for data in events:
                yield event(data)
    except Exception as error:
        if not isinstance(error, LlmError):
            logger.exception("a stream failed")
        access_of(request).error = answer_to(error).code
        yield event(error_body(error, native=is_native(request)))
    yield DONE


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
