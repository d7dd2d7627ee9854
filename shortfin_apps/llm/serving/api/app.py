"""The HTTP application: its routes, error handlers and middleware."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable, Sequence

from fastapi import FastAPI
from fastapi.routing import APIRoute
from fastapi_offline import FastAPIOffline
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shortfin_apps.llm import __version__
from shortfin_apps.llm.contract.errors import UnavailableError
from shortfin_apps.llm.serving.api import admin, chat, completions, native, ops
from shortfin_apps.llm.serving.api.anthropic import routes as anthropic
from shortfin_apps.llm.serving.api.json_body import HEADER, FieldCheck, install_validation_handler
from shortfin_apps.llm.serving.api.page.assets import PATHS as PAGE_PATHS
from shortfin_apps.llm.serving.api.page.routes import Page
from shortfin_apps.llm.serving.api.responses import routes as responses
from shortfin_apps.llm.serving.api.service import Service
from shortfin_apps.llm.serving.http.access_log import AccessLogMiddleware
from shortfin_apps.llm.serving.http.auth import KEY_HEADER, OPEN_PATHS, AuthMiddleware, KeyRing
from shortfin_apps.llm.serving.http.body_limit import BodyLimitMiddleware
from shortfin_apps.llm.serving.http.errors import error_response, install_error_handlers
from shortfin_apps.llm.serving.http.request_id import current_request_id
from shortfin_apps.llm.serving.http.streaming import StreamTurns

# Sent by Anthropic's clients; they have no effect here.
ANTHROPIC_HEADERS = ("Anthropic-Version", "Anthropic-Beta", "Anthropic-Dangerous-Direct-Browser-Access")
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def create_app(
    service: Service,
    *,
    root_path: str = "",
    keys: KeyRing | None = None,
    cors_origins: Sequence[str] = (),
) -> FastAPI:
    """Create the application for `service`, whose model may still be loading."""
    # FastAPIOffline serves the assets of /docs and /redoc; FastAPI would load them from the internet.
    offline = {"validatorUrl": None}
    app = FastAPIOffline(title="shortfin-llm", version=__version__, swagger_ui_parameters=offline)
    app.state.service = service
    app.state.field_check = FieldCheck(strict=service.strict_fields)
    app.state.stream_turns = StreamTurns(service.stream_keep_alive_s)
    routers = [each.router for each in (native, completions, chat, responses, anthropic, ops, admin)]
    for router in routers:
        app.include_router(router)
    routes = [each for router in routers for each in router.routes if isinstance(each, APIRoute)]
    app.state.paths = [each.path_format for each in routes]
    app.state.page = Page(service)
    app.router.routes += app.state.page.routes()
    install_error_handlers(app)
    install_validation_handler(app)
    # The middleware added last handles a request first.
    app.add_middleware(HeadMiddleware)
    app.add_middleware(BodyLimitMiddleware, max_bytes=service.limits.body_bytes)
    app.add_middleware(AuthMiddleware, keys=keys or KeyRing(), open_paths=OPEN_PATHS | PAGE_PATHS)
    if cors_origins:  # handles requests before AuthMiddleware: browsers send preflights without a key
        _add_cors(app, cors_origins)
    app.add_middleware(AccessLogMiddleware, clock=service.metrics.clock)
    if service.traces is not None:
        from shortfin_apps.llm.serving.http.tracing import (
            TracingMiddleware,  # imports OpenTelemetry, an extra
        )

        tracer = service.traces.get_tracer("shortfin_llm", __version__)
        app.add_middleware(
            TracingMiddleware, tracer=tracer, model_name=service.name, clock=service.metrics.clock
        )
    app.add_middleware(RequestIdMiddleware)
    app.add_middleware(DrainMiddleware, service=service)
    if root_path:
        app.add_middleware(RootPathMiddleware, root_path=root_path)
    return app


def refusal(reason: str, clock: Callable[[], float]) -> ASGIApp:
    """Return an application that answers every request with 503 and `reason`.

    `clock`: seconds, for the access log.
    """

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        response = error_response(Request(scope), UnavailableError(reason))
        response.headers["Connection"] = "close"
        await response(scope, receive, send)

    return RequestIdMiddleware(AccessLogMiddleware(refuse, clock))


def _add_cors(app: FastAPI, origins: Sequence[str]) -> None:
    app.add_middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST", "PUT", "DELETE"],
        allow_headers=["Authorization", "Content-Type", "X-Request-Id", KEY_HEADER, *ANTHROPIC_HEADERS],
        expose_headers=["Retry-After", HEADER, "X-Request-Id"],
    )


class RootPathMiddleware:
    """Sets ASGI's `root_path`, and prepends `root_path` to `path` if a proxy has stripped it."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            if not path.startswith(self._root_path + "/"):
                path = self._root_path + path
            scope.update(path=path, root_path=self._root_path)
        await self._app(scope, receive, send)


class HeadMiddleware:
    """Answers HEAD like GET but without the body, because FastAPI's routes accept only GET.

    The scope's `is_head` tells routes with an endless body not to start the body.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET", "is_head": True}, receive, send_without_body)


class RequestIdMiddleware:
    """Assigns each request an id, and returns the id in the answer's header `X-Request-Id`.

    The id is the client's `X-Request-Id` if valid, otherwise random. It is also in a context variable for
    log lines: uvicorn serves each request in its own task.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        current_request_id.set(request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class DrainMiddleware:
    """While the server drains, closes each connection after its answer, so that clients reconnect elsewhere.

    Swallows CancelledError while the server stops, so that cancelled requests are not logged as errors.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_close(message: Message) -> None:
            if self._service.stopping and message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        try:
            await self._app(scope, receive, send_and_close)
        except asyncio.CancelledError:
            if not self._service.stopping:
                raise
