"""The HTTP application."""

from __future__ import annotations

import re
import uuid

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shortfin_apps.llm import __version__
from shortfin_apps.llm.api import native, openai, ops
from shortfin_apps.llm.api.errors import install_error_handlers
from shortfin_apps.llm.api.service import Service

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def create_app(service: Service, *, root_path: str = "") -> FastAPI:
    """An application over `service`, which may still be loading its model."""
    app = FastAPI(title="shortfin-llm", version=__version__, root_path=root_path)
    app.state.service = service
    for router in (native.router, openai.router, ops.router):
        app.include_router(router)
    install_error_handlers(app)
    app.add_middleware(RequestIdMiddleware)
    return app


class RequestIdMiddleware:
    """Gives every request an id, the caller's `X-Request-Id` if it is sane, and returns it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)
