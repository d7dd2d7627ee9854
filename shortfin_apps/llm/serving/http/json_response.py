"""Answers in JSON, serialised by orjson."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from shortfin_apps.llm.lone_surrogates import json_of


class JsonResponse(Response):
    """A response serialised by orjson, which is fast and refuses NaN."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_of(content)
