"""Converts errors to HTTP answers in one of three formats.

OpenAI's, on all other routes:        {"error": {"message", "type", "param", "code"}}
upstream shortfin's, on `/generate`:  {"error": message, "code", ...extra fields}
Anthropic's, on `/v1/messages`:       {"type": "error", "error": {"type", "message"}}
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from shortfin_apps.llm.contract.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    InvocationError,
    LlmError,
    OverloadedError,
    RequestAbortedError,
    UnavailableError,
)
from shortfin_apps.llm.serving.api.access_log import access_of
from shortfin_apps.llm.serving.api.anthropic.schema import MESSAGES_BODIES
from shortfin_apps.llm.serving.api.json_body import JsonResponse
from shortfin_apps.llm.serving.api.responses.schema import RESPONSES_BODIES
from shortfin_apps.llm.serving.api.schema import BODIES, NOT_SERVED, type_of

logger = logging.getLogger(__name__)

RETRY_AFTER_LOADING_S = 5.0
FIELD_NAMES = frozenset(
    field.alias or name
    for body in (*BODIES, *MESSAGES_BODIES, *RESPONSES_BODIES)
    for name, field in body.model_fields.items()
)


class ErrorForm(Enum):
    """A format of error bodies."""

    OPENAI = auto()
    NATIVE = auto()
    ANTHROPIC = auto()


# Suffixes of the routes that do not use OpenAI's format; a proxy's prefix may precede them.
FORMS: tuple[tuple[str, ErrorForm], ...] = (
    ("/generate", ErrorForm.NATIVE),
    ("/v1/messages", ErrorForm.ANTHROPIC),
    ("/v1/messages/count_tokens", ErrorForm.ANTHROPIC),
)
# Anthropic's `type` by status; for other 4xx `invalid_request_error`, for other 5xx `api_error`.
ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ModelNotFoundError(InvalidRequestError):
    """The request names a model that is not served here."""


class ResponseNotFoundError(InvalidRequestError):
    """The request names a response that is not stored, or that belongs to another caller."""


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
    (ResponseNotFoundError, Answer(404, "invalid_request_error", "response_not_found")),
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


def error_body(error: Exception, form: ErrorForm) -> dict[str, Any]:
    """Return the body for `error`. The message of an unexpected error is only logged, not sent."""
    answer, message = answer_to(error), message_of(error)
    invalid = error if isinstance(error, InvalidRequestError) else None
    match form:
        case ErrorForm.NATIVE:
            return {"error": message, "code": answer.code, **(invalid.extra if invalid else {})}
        case ErrorForm.ANTHROPIC:
            return _anthropic_body(answer.status, message)
        case ErrorForm.OPENAI:
            param = invalid.param if invalid else None
            return _openai_body(message, answer.openai_type, param, answer.code)


def message_of(error: Exception) -> str:
    """Return the message to send to the client."""
    return str(error) if isinstance(error, LlmError) else "internal error; see the server's log"


def _openai_body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _anthropic_body(status: int, message: str) -> dict[str, Any]:
    other = "api_error" if status >= 500 else "invalid_request_error"
    return {"type": "error", "error": {"type": ANTHROPIC_TYPES.get(status, other), "message": message}}


def error_response(request: Request, error: Exception) -> Response:
    answer = answer_to(error)
    access_of(request).error = answer.code
    body = error_body(error, form_of(request))
    return JsonResponse(body, status_code=answer.status, headers=_headers(error))


def form_of(request: Request) -> ErrorForm:
    """Return the error format of the request's route."""
    path = request.url.path
    return next((form for end, form in FORMS if path.endswith(end)), ErrorForm.OPENAI)


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


def http_response(request: Request, error: HTTPException) -> Response:
    """Return the answer to an HTTP error such as 404, 405 or 413."""
    message = f"{request.method} {request.url.path}: {error.detail}"
    match form_of(request):
        case ErrorForm.NATIVE:
            body: dict[str, Any] = {"error": message, "code": "INVALID_REQUEST_ARGS"}
        case ErrorForm.ANTHROPIC:
            body = _anthropic_body(error.status_code, message)
        case ErrorForm.OPENAI:
            body = _openai_body(message, "invalid_request_error", None, None)
    return JsonResponse(body, status_code=error.status_code, headers=dict(error.headers or {}))
