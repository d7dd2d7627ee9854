"""Strict JSON in (no NaN, no lone surrogates, no bottomless nesting), fast JSON out."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from shortfin_apps.llm.api.service import service_of


class JsonResponse(Response):
    """A body serialised by orjson."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


class JsonRequest(Request):
    """A request whose body is parsed by orjson; its error is a `json.JSONDecodeError`."""

    async def json(self) -> Any:
        value = orjson.loads(await self.body())
        service_of(self).limits.check_json(value)
        return value


class JsonRoute(APIRoute):
    """A route that reads its body that way."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json
