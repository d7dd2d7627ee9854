"""Converts pydantic's errors of a body to one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.api.schema import FIELD_NAMES, NOT_SERVED, type_of
from shortfin_apps.llm.serving.http.errors import error_response


def install_validation_handler(app: FastAPI) -> None:
    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(request, _as_invalid_request(request, error))

    app.add_exception_handler(RequestValidationError, on_validation)


def _as_invalid_request(request: Request, error: RequestValidationError) -> InvalidRequestError:
    """Summarise pydantic's errors in one sentence: the first invalid field and all rules it breaks."""
    problems = error.errors()
    first = _first(problems)
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return InvalidRequestError(f"the body is not valid JSON: {reason}")
    if first["loc"][0] == "query":
        name = str(first["loc"][-1])
        return InvalidRequestError(f"`{name}`: {first['msg']}", name)
    param = _field(first["loc"])
    if param is None:
        if "json" not in request.headers.get("content-type", ""):
            return InvalidRequestError("send the body with the header `Content-Type: application/json`")
        return InvalidRequestError(f"the body: {first['msg']}")
    if first["type"] == NOT_SERVED:
        return InvalidRequestError(f"`{param}`: {first['msg']}{_given_type(first.get('input'))}", param)
    rules = dict.fromkeys(p["msg"] for p in problems if _field(p["loc"]) == param)
    return InvalidRequestError(f"`{param}`: {'; or '.join(rules)}", param)


def _first(problems: Sequence[Any]) -> Any:
    """Return the first problem; for a value with several allowed types, that of the best-fitting type.

    An unsupported type comes first, then the type of which pydantic read the most.
    """
    if (not_served := next((p for p in problems if p["type"] == NOT_SERVED), None)) is not None:
        return not_served
    top = problems[0]["loc"][:2]
    return max((p for p in problems if p["loc"][:2] == top), key=lambda problem: len(_path(problem["loc"])))


def _given_type(value: object) -> str:
    kind = type_of(value)
    return "" if kind is None else f"; this one is of type `{kind[:40]}`"


def _field(location: Sequence[int | str]) -> str | None:
    """The dotted field name in a pydantic location, without list indices and union branches."""
    return ".".join(part for part in _path(location) if isinstance(part, str)) or None


def _path(location: Sequence[int | str]) -> list[int | str]:
    """A location without union branches."""
    return [part for part in location[1:] if isinstance(part, int) or part in FIELD_NAMES]
