"""Refuses oversized bodies with 413, without reading a body with a too large Content-Length."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shortfin_apps.llm.serving.http.errors import http_response


class BodyLimitMiddleware:
    """Passes at most `max_bytes` of a body to the application, whether with Content-Length or chunked.

    Starlette's own middleware for this answers in plain text, not in our error format.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        announced = Headers(scope=scope).get("content-length", "") if scope["type"] == "http" else ""
        # More than 18 digits are too large without parsing them.
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
        return HTTPException(413, f"the body is larger than the limit of {self._max_bytes:,} bytes")
