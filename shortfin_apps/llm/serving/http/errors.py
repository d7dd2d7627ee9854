"""Converts errors to HTTP answers: in OpenAI's shape, or in one that a route gives to `register_shape`.

OpenAI's shape is {"error": {"message", "type", "param", "code"}}.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from shortfin_apps.llm.contract.errors import (
    ContextLengthError,
    DeadlineExceededError,
    DeviceLostError,
    InvalidRequestError,
    InvocationError,
    LlmError,
    ModelNotFoundError,
    OverloadedError,
    RequestAbortedError,
    UnavailableError,
)
from shortfin_apps.llm.serving.http.access_log import access_of
from shortfin_apps.llm.serving.http.json_response import JsonResponse

logger = logging.getLogger(__name__)

RETRY_AFTER_LOADING_S = 5.0
NEAR_PATH = 0.7  # similarity from which a route is proposed for a wrong path
MAX_NEAR_PATH_CHARS = 100
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"  # OpenAI's code, at which agents shorten their history


class Problem(NamedTuple):
    """The contents of an error body. `code` and `param` are None for HTTP errors such as 404."""

    status: int
    message: str
    openai_type: str
    code: str | None = None
    param: str | None = None
    extra: Mapping[str, Any] = {}


Shape = Callable[[Problem], dict[str, Any]]
_SHAPES: dict[str, Shape] = {}


def register_shape(path: str, shape: Shape) -> None:
    """Let `shape` make the error bodies of requests with a path that ends with `path`.

    A proxy's prefix may precede `path`. If several registered paths match, the longest is used.
    """
    _SHAPES[path] = shape


def openai_shape(problem: Problem) -> dict[str, Any]:
    _, message, kind, code, param, _ = problem
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class ResponseNotFoundError(InvalidRequestError):
    """The request names a response that is not stored, or that belongs to another caller."""


class UnauthorizedError(LlmError):
    """The request has no valid API key."""


class ForbiddenError(LlmError):
    """The caller's key does not give access to the route."""


class Answer(NamedTuple):
    """The HTTP status, OpenAI's `type`, and the `code` of a class of errors."""

    status: int
    openai_type: str
    code: str


# The first matching class applies.
ANSWERS: tuple[tuple[type[Exception], Answer], ...] = (
    (ModelNotFoundError, Answer(404, "invalid_request_error", "model_not_found")),
    (ResponseNotFoundError, Answer(404, "invalid_request_error", "response_not_found")),
    (UnauthorizedError, Answer(401, "authentication_error", "invalid_api_key")),
    (ForbiddenError, Answer(403, "permission_error", "FORBIDDEN")),
    (ContextLengthError, Answer(400, "invalid_request_error", CONTEXT_LENGTH_EXCEEDED)),
    (InvalidRequestError, Answer(400, "invalid_request_error", "INVALID_REQUEST_ARGS")),
    (OverloadedError, Answer(429, "rate_limit_error", "QUEUE_FULL")),
    (UnavailableError, Answer(503, "service_unavailable_error", "UNAVAILABLE")),
    (DeadlineExceededError, Answer(408, "timeout_error", "DEADLINE_EXCEEDED")),
    (RequestAbortedError, Answer(499, "request_aborted", "CANCELLED")),
    (DeviceLostError, Answer(503, "service_unavailable_error", "DEVICE_LOST")),
    (InvocationError, Answer(500, "server_error", "INVOCATION_FAILED")),
    (Exception, Answer(500, "server_error", "INTERNAL_ERROR")),
)


def answer_to(error: Exception) -> Answer:
    return next(answer for kind, answer in ANSWERS if isinstance(error, kind))


def problem_of(error: Exception) -> Problem:
    """Return the contents of the error body. An unexpected error's message is only logged, not sent."""
    answer, message = answer_to(error), message_of(error)
    if not isinstance(error, InvalidRequestError):
        return Problem(answer.status, message, answer.openai_type, answer.code)
    return Problem(answer.status, message, answer.openai_type, answer.code, error.param, error.extra)


def message_of(error: Exception) -> str:
    """Return the message to send to the client."""
    return str(error) if isinstance(error, LlmError) else "internal error; see the server's log"


def error_response(request: Request, error: Exception) -> Response:
    answer = answer_to(error)
    access_of(request).error = answer.code
    body = shape_of(request)(problem_of(error))
    return JsonResponse(body, status_code=answer.status, headers=_headers(error))


def shape_of(request: Request) -> Shape:
    """Return the shape of the route's error bodies."""
    path = request.url.path
    ends = [end for end in _SHAPES if path.endswith(end)]
    return _SHAPES[max(ends, key=len)] if ends else openai_shape


def install_error_handlers(app: FastAPI) -> None:
    async def on_llm_error(request: Request, error: Exception) -> Response:
        return error_response(request, error)

    async def on_unexpected(request: Request, error: Exception) -> Response:
        # Starlette calls this outside of all middleware, and logs the traceback.
        response = error_response(request, error)
        response.headers["X-Request-Id"] = request.state.request_id
        return response

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return http_response(request, error)

    app.add_exception_handler(LlmError, on_llm_error)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_unexpected)


def _headers(error: Exception) -> dict[str, str]:
    if isinstance(error, UnauthorizedError):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, OverloadedError):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    if isinstance(error, UnavailableError | DeviceLostError):
        return {"Retry-After": str(math.ceil(RETRY_AFTER_LOADING_S))}
    return {}


def _advice(request: Request, error: HTTPException) -> str:
    """Return what to do about a wrong path or method: the nearest route, or the allowed methods."""
    if error.status_code == 405:
        return f"; use {(error.headers or {}).get('Allow')}"
    if error.status_code != 404:
        return ""
    prefix = request.scope.get("root_path", "")
    asked = request.url.path.removeprefix(prefix)
    # Shortened, because the search takes time in proportion to the square of the length.
    near = get_close_matches(asked[:MAX_NEAR_PATH_CHARS], request.app.state.paths, 1, NEAR_PATH)
    return f"; did you mean {prefix}{near[0]}?" if near else f"; {prefix}/docs lists the routes"


def http_response(request: Request, error: HTTPException) -> Response:
    """Return the answer to an HTTP error such as 404, 405 or 413."""
    message = f"{request.method} {request.url.path}: {error.detail}{_advice(request, error)}"
    body = shape_of(request)(Problem(error.status_code, message, "invalid_request_error"))
    return JsonResponse(body, status_code=error.status_code, headers=dict(error.headers or {}))
