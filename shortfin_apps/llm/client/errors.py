"""Errors of the client, and the conversion of a server's error answers to errors.

LlmError
├── InvalidRequestError, OverloadedError, UnavailableError, RequestAbortedError   from the server's answer
└── ClientError
    ├── ConnectionFailedError      no answer, or the connection broke
    ├── AuthenticationError        the API key is missing or wrong        (HTTP 401, 403)
    └── ServerError                the server failed, or its answer is invalid
"""

from __future__ import annotations

from http import HTTPStatus

import orjson

from shortfin_apps.llm.contract.errors import (
    InvalidRequestError,
    LlmError,
    OverloadedError,
    RequestAbortedError,
    UnavailableError,
)

_STATUS_OF_TYPE = {
    "invalid_request_error": 400,
    "rate_limit_error": 429,
    "request_aborted": 499,
    "service_unavailable_error": 503,
}


class ClientError(LlmError):
    """Base class of the client's own errors."""


class ConnectionFailedError(ClientError):
    """No server answers at the address, or the connection broke before the answer was complete."""


class AuthenticationError(ClientError):
    """The server rejected the API key."""


class ServerError(ClientError):
    """The server failed, or its answer is invalid. `status`: HTTP status of an error answer, else None."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def error_from_response(status: int, body: bytes, retry_after_s: float | None) -> LlmError:
    """Convert an HTTP response with another status than 2xx to an error."""
    message, param = _message_and_param(body)
    return error_for(status, message or _phrase(status), param, retry_after_s)


def error_for(status: int, message: str, param: str | None, retry_after_s: float | None = None) -> LlmError:
    """Return the error for the status of an HTTP response or a streamed error.

    `param`: the request's field at fault, if the server names it.
    """
    match status:
        case 401 | 403:
            return AuthenticationError(f"the server refuses access: {message}")
        case 429:
            return OverloadedError(message, 1.0 if retry_after_s is None else retry_after_s)
        case 499:
            return RequestAbortedError(message)
        case 503:
            return UnavailableError(message)
        case _ if 400 <= status < 500:
            return InvalidRequestError(message, param)
        case _:
            return ServerError(f"the server failed with status {status}: {message}", status)


def streamed_error(error: object) -> LlmError:
    """Convert the value of `error` in a streamed event; an unknown type of error gives ServerError."""
    message, param = _describe(error)
    return error_for(_streamed_status(error), message or "no reason given", param)


def _streamed_status(error: object) -> int:
    # vLLM puts the HTTP status into `code`; OpenAI and this package's server only have `type`.
    if not isinstance(error, dict):
        return 500
    code, kind = error.get("code"), error.get("type")
    return code if isinstance(code, int) and 400 <= code < 600 else _STATUS_OF_TYPE.get(str(kind), 500)


def _message_and_param(body: bytes) -> tuple[str | None, str | None]:
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace").strip()[:500] or None, None
    if not isinstance(parsed, dict):
        return _shown(parsed), None
    # OpenAI's format has `error`; FastAPI's own errors have `detail`; some servers have only `message`.
    return _describe(parsed.get("error") or parsed.get("detail") or parsed)


def _describe(error: object) -> tuple[str | None, str | None]:
    if not isinstance(error, dict):
        return (_shown(error), None) if error else (None, None)
    message, param = error.get("message"), error.get("param")
    text = message if isinstance(message, str) else _shown(error)
    return text, param if isinstance(param, str) else None


def _shown(value: object) -> str:
    """Return a string unchanged and any other value as JSON, truncated to 500 characters."""
    try:
        return (value if isinstance(value, str) else orjson.dumps(value).decode())[:500]
    except TypeError:  # orjson can parse deeper nesting than it can write
        return "an error that is nested too deep to be shown"


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "no reason given"
