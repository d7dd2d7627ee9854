from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from shortfin_apps.llm.serving.api.limits import Limits
from tests.serving.api.harness import Harness

JSON = {"content-type": "application/json"}
LIMIT = 1000


def body_of(size: int) -> bytes:
    body = b'{"text": "a", "x": "' + b"y" * size
    return body[: size - 2] + b'"}'


async def in_pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 100):
        yield body[start : start + 100]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/tokenize"])
@pytest.mark.parametrize("chunked", [False, True])
async def test_one_byte_above_the_limit_is_413(path: str, chunked: bool) -> None:
    harness = Harness(limits=Limits(body_bytes=LIMIT))
    body = body_of(LIMIT + 1)
    response = await harness.client.post(path, content=in_pieces(body) if chunked else body, headers=JSON)
    assert ("content-length" not in response.request.headers) is chunked
    assert response.status_code == 413
    error = response.json()["error"]
    message = error if path == "/generate" else error["message"]
    assert "larger than the limit of 1,000 bytes" in message


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_at_the_limit_is_accepted(chunked: bool) -> None:
    body = body_of(LIMIT)
    assert len(body) == LIMIT
    harness = Harness(limits=Limits(body_bytes=LIMIT))
    content = in_pieces(body) if chunked else body
    response = await harness.client.post("/generate", content=content, headers=JSON)
    assert response.status_code == 200, response.text


async def test_a_content_length_above_the_limit_is_refused_before_reading() -> None:
    async def unread() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    harness = Harness(limits=Limits(body_bytes=LIMIT))
    for length in ("1001", "9" * 40):
        headers = {**JSON, "content-length": length}
        response = await harness.client.post("/generate", content=unread(), headers=headers)
        assert response.status_code == 413
