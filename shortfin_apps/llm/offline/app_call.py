"""Calls an ASGI application without a connection, streaming its answer.

httpx's ASGITransport returns an answer only when it is complete and therefore cannot stream.
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
    """An application's answer. Unread pieces are kept without limit."""

    def __init__(self, body: bytes) -> None:
        self.status = 500  # kept if the application ends without an answer
        self.headers: dict[str, str] = {}  # by lower-case name
        self._body: bytes | None = body  # None once the application has received it
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()  # None marks the end
        self._begun = asyncio.Event()
        self._ended = asyncio.Event()

    async def pieces(self) -> AsyncIterator[bytes]:
        while (piece := await self._pieces.get()) is not None:
            yield piece

    async def whole(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def begins(self) -> None:
        """Wait until `status` and `headers` are set."""
        await self._begun.wait()

    async def receive(self) -> Message:
        """Return the request's body; later calls wait for the end of the answer."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._ended.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Add a message. Never waits, as the application may call it outside of a task."""
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
    """POST JSON and yield the answer once it has started; leaving the context early ends the request."""
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
    except Exception as error:  # Starlette re-raises errors that it has answered with 500
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
