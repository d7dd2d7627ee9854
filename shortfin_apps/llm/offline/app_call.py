"""Calls an ASGI application without a connection: a request goes in, its answer comes out as it is made.

httpx's ASGITransport returns an answer only when it is complete, so nothing could be streamed with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

Message = MutableMapping[str, Any]
App = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]

logger = logging.getLogger(__name__)


class AppAnswer:
    """The answer of an application, whose pieces are kept until they are read, however many there are."""

    def __init__(self, body: bytes) -> None:
        self.status = 500  # of an application that ends without an answer, too
        self.headers: dict[str, str] = {}  # by lower-case name
        self._body: bytes | None = body  # None once the application has it
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()  # None is the end
        self._begun = asyncio.Event()
        self._ended = asyncio.Event()

    async def pieces(self) -> AsyncIterator[bytes]:
        while (piece := await self._pieces.get()) is not None:
            yield piece

    async def whole(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def begins(self) -> None:
        """Returns when `status` and `headers` are there."""
        await self._begun.wait()

    async def receive(self) -> Message:
        """The request's body, and then nothing while the answer is awaited."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._ended.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Never waits, as the application may call it outside of a task."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {
                name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]
            }
            self._begun.set()
            return
        if piece := message.get("body", b""):
            self._pieces.put_nowait(piece)
        if not message.get("more_body", False):
            self.end()

    def end(self) -> None:
        if not self._ended.is_set():
            self._pieces.put_nowait(None)
        self._begun.set()
        self._ended.set()


@asynccontextmanager
async def calling(app: App, path: str, body: bytes) -> AsyncIterator[AppAnswer]:
    """Context with the answer to a POST of JSON, once it has begun; leaving it early ends the request."""
    answer = AppAnswer(body)
    task = asyncio.ensure_future(_run(app, _scope(path, body), answer))
    try:
        await answer.begins()
        yield answer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _run(app: App, scope: Message, answer: AppAnswer) -> None:
    try:
        await app(scope, answer.receive, answer.send)
    except Exception as error:  # Starlette raises what it has answered with 500
        logger.error("a request failed", exc_info=error)
    finally:
        answer.end()


def _scope(path: str, body: bytes) -> Message:
    headers = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body))}
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("ascii"),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()],
        "server": ("localhost", None),
        "client": None,
        "state": {},
    }
