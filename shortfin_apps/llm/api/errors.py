"""Converts errors to HTTP answers, in one of two formats.

OpenAI's, on all routes but `/generate`:  {"error": {"message", "type", "param", "code"}}
upstream shortfin's, on `/generate`:      {"error": message, "code", ...extra fields}
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from shortfin_apps.llm.api.access_log import access_of
from shortfin_apps.llm.api.json_body import JsonResponse
from shortfin_apps.llm.api.schema import FIELD_NAMES
from shortfin_apps.llm.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    InvocationError,
    LlmError,
    OverloadedError,
    RequestAbortedError,
    UnavailableError,
)

logger = logging.getLogger(__name__)

NATIVE_PATH = "/generate"
RETRY_AFTER_LOADING_S = 5.0


class ModelNotFoundError(InvalidRequestError):
    """The request names a model that is not served here."""


class UnauthorizedError(LlmError):
    """The request has no valid API key."""


class ForbiddenError(LlmError):
    """The caller's key does not give access to the route."""


class Answer(NamedTuple):
    """HTTP status, OpenAI's `type`, and the `code` in both formats for a class of errors."""

    status: int
    openai_type: str
    code: str


# The first matching class applies.
ANSWERS: tuple[tuple[type[Exception], Answer], ...] = (
    (ModelNotFoundError, Answer(404, "invalid_request_error", "model_not_found")),
    (UnauthorizedError, Answer(401, "authentication_error", "invalid_api_key")),
    (ForbiddenError, Answer(403, "permission_error", "FORBIDDEN")),
    (InvalidRequestError, Answer(400, "invalid_request_error", "INVALID_REQUEST_ARGS")),
    (OverloadedError, Answer(429, "rate_limit_error", "QUEUE_FULL")),
    (UnavailableError, Answer(503, "service_unavailable_error", "UNAVAILABLE")),
    (DeadlineExceededError, Answer(408, "timeout_error", "DEADLINE_EXCEEDED")),
    (RequestAbortedError, Answer(499, "request_aborted", "CANCELLED")),
    (InvocationError, Answer(500, "server_error", "INVOCATION_FAILED")),
    (Exception, Answer(500, "server_error", "INTERNAL_ERROR")),
)


def answer_to(error: Exception) -> Answer:
    return next(answer for kind, answer in ANSWERS if isinstance(error, kind))


def error_body(error: Exception, *, native: bool) -> dict[str, Any]:
    """The body for `error`. The message of an unexpected error is not sent: it goes to the log only."""
    answer = answer_to(error)
    message = str(error) if isinstance(error, LlmError) else "internal error; see the server's log"
    if native:
        extra = error.extra if isinstance(error, InvalidRequestError) else {}
        return {"error": message, "code": answer.code, **extra}
    param = error.param if isinstance(error, InvalidRequestError) else None
    return {"error": {"message": message, "type": answer.openai_type, "param": param, "code": answer.code}}


def error_response(request: Request, error: Exception) -> Response:
    answer = answer_to(error)
    access_of(request).error = answer.code
    body = error_body(error, native=is_native(request))
    return JsonResponse(body, status_code=answer.status, headers=_headers(error))


def is_native(request: Request) -> bool:
    """Whether the request gets errors in upstream's format."""
    return request.url.path.endswith(NATIVE_PATH)


def install_error_handlers(app: FastAPI) -> None:
    async def on_llm_error(request: Request, error: Exception) -> Response:
        return error_response(request, error)

    async def on_unexpected(request: Request, error: Exception) -> Response:
        # Starlette calls this outside of all middleware, and logs the traceback.
        response = error_response(request, error)
        response.headers["X-Request-Id"] = request.state.request_id
        return response

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(request, _as_invalid_request(request, error))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return http_response(request, error)

    app.add_exception_handler(LlmError, on_llm_error)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_unexpected)


def _headers(error: Exception) -> dict[str, str]:
    if isinstance(error, UnauthorizedError):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, OverloadedError):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    if isinstance(error, UnavailableError):
        return {"Retry-After": str(math.ceil(RETRY_AFTER_LOADING_S))}
    return {}


def _as_invalid_request(request: Request, error: RequestValidationError) -> InvalidRequestError:
    """One sentence from pydantic's list of errors: the first invalid field, and all rules it breaks."""
    problems = error.errors()
    first = problems[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return InvalidRequestError(f"the body is not valid JSON: {reason}")
    param = _field(first["loc"])
    if param is None:
        if "json" not in request.headers.get("content-type", ""):
            return InvalidRequestError("send the body with the header `Content-Type: application/json`")
        return InvalidRequestError(f"the body: {first['msg']}")
    rules = dict.fromkeys(p["msg"] for p in problems if _field(p["loc"]) == param)
    return InvalidRequestError(f"`{param}`: {'; or '.join(rules)}", param)


def _field(location: Sequence[int | str]) -> str | None:
    """The dotted field name in a pydantic location, without list indices and union branches."""
    names = [part for part in location[1:] if isinstance(part, str) and part in FIELD_NAMES]
    return ".".join(names) or None


def http_response(request: Request, error: HTTPException) -> Response:
    """The answer to errors of HTTP itself: 404, 405, 413 and the like."""
    message = f"{request.method} {request.url.path}: {error.detail}"
    if is_native(request):
        body: dict[str, Any] = {"error": message, "code": "INVALID_REQUEST_ARGS"}
    else:
        body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
    return JsonResponse(body, status_code=error.status_code, headers=dict(error.headers or {}))
