"""Strict JSON in (no NaN, no lone surrogates, no bottomless nesting), fast JSON out.

What a body gave and no route read is told in a header.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from shortfin_apps.llm.api.body_fields import HEADER, header_value
from shortfin_apps.llm.api.schema import Body
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
    """A route that reads its body that way; its handler calls `check_fields`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            response = await handle(JsonRequest(request.scope, request.receive))
            if ignored := getattr(request.state, "ignored_fields", None):
                response.headers[HEADER] = header_value(ignored)
            return response

        return handle_json


def check_fields(body: Body, request: Request) -> None:
    """Raises InvalidRequestError for a field that is not served; the answer will name those ignored."""
    request.state.ignored_fields = service_of(request).field_check.ignored(body)
