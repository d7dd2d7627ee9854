"""Bodies that are too large are refused with 413, before they are read where their length is announced."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shortfin_apps.llm.api.errors import http_response


class BodyLimitMiddleware:
    """At most `max_bytes` of a body reach the application, announced or chunked.

    Starlette has one too, but it answers in plain text.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        announced = Headers(scope=scope).get("content-length", "") if scope["type"] == "http" else ""
        # Digits that no machine's integer holds need not be read to know.
        if announced.isdecimal() and (len(announced) > 18 or int(announced) > self._max_bytes):
            response = http_response(Request(scope), self._too_large())
            await response(scope, receive, send)
            return
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise self._too_large()
            return message

        await self._app(scope, limited, send)

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the body is larger than the {self._max_bytes:,} bytes that are accepted")
