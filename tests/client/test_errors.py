from __future__ import annotations

import json

import orjson
import pytest

from shortfin_apps.llm.client import AuthenticationError, ServerError
from shortfin_apps.llm.client.errors import error_from_response, streamed_error
from shortfin_apps.llm.contract.errors import (
    InvalidRequestError,
    LlmError,
    OverloadedError,
    RequestAbortedError,
    UnavailableError,
)

BODY = json.dumps({"error": {"message": "too hot", "param": "temperature", "code": 1}}).encode()


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidRequestError),
        (401, AuthenticationError),
        (403, AuthenticationError),
        (404, InvalidRequestError),
        (413, InvalidRequestError),
        (422, InvalidRequestError),
        (429, OverloadedError),
        (499, RequestAbortedError),
        (500, ServerError),
        (503, UnavailableError),
    ],
)
def test_each_status_has_its_error(status: int, kind: type[LlmError]) -> None:
    error = error_from_response(status, BODY, 2.0)
    assert type(error) is kind
    assert "too hot" in str(error)


def test_an_invalid_request_names_its_parameter() -> None:
    error = error_from_response(400, BODY, None)
    assert isinstance(error, InvalidRequestError)
    assert error.param == "temperature"


def test_an_overload_has_its_retry_after() -> None:
    error = error_from_response(429, BODY, 2.5)
    assert isinstance(error, OverloadedError)
    assert error.retry_after_s == 2.5


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": "plain"}', "plain"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"detail": [{"loc": ["x"]}]}', '[{"loc":["x"]}]'),
        (b'{"message": "old", "object": "error"}', "old"),
        (b'{"error": {"reason": 1}}', '{"reason":1}'),
        (b"<html>Bad Request</html>", "<html>Bad Request</html>"),
        (b"[1]", "[1]"),
        (b"", "Bad Request"),
        (b"\xff\xfe", "\ufffd\ufffd"),
    ],
)
def test_every_kind_of_body_has_a_message(body: bytes, message: str) -> None:
    assert str(error_from_response(400, body, None)) == message


def test_an_unknown_status_has_a_message() -> None:
    assert "599" in str(error_from_response(599, b"", None))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"message": "m", "code": 400}, InvalidRequestError),
        ({"message": "m", "code": "QUEUE_FULL", "type": "rate_limit_error"}, OverloadedError),
        ({"message": "m", "type": "request_aborted"}, RequestAbortedError),
        ({"message": "m", "type": "server_error"}, ServerError),
        ("just text", ServerError),
    ],
)
def test_errors_in_a_stream_have_their_classes(error: object, kind: type[LlmError]) -> None:
    assert type(streamed_error(error)) is kind


@pytest.mark.parametrize("body", [b'{"error":' * 300 + b"1" + b"}" * 300, b"[" * 1000 + b"]" * 1000])
def test_an_error_that_is_nested_deep_is_an_error(body: bytes) -> None:
    error = error_from_response(500, body, None)
    assert "nested too deep" in str(error)
    assert "nested too deep" in str(streamed_error(orjson.loads(body)))
