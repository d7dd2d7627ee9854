from __future__ import annotations

import pytest

from shortfin_apps.llm.api.errors import ANSWERS, answer_to
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.errors import (
    InvalidRequestError,
    InvocationError,
    LlmError,
    OverloadedError,
    RequestAbortedError,
    UnavailableError,
)
from tests.api.harness import Harness

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequestError("x"), 400),
        (OverloadedError("x"), 429),
        (UnavailableError("x"), 503),
        (RequestAbortedError("x"), 499),
        (InvocationError("x"), 500),
        (LlmError("x"), 500),
        (KeyError("x"), 500),
    ],
)
def test_the_table(error: Exception, status: int) -> None:
    assert answer_to(error).status == status


def test_subclasses_stand_before_their_bases_in_the_table() -> None:
    kinds = [kind for kind, _ in ANSWERS]
    for i, kind in enumerate(kinds):
        assert not any(issubclass(later, kind) for later in kinds[i + 1 :])


MALFORMED = {
    "not json": b"{",
    "empty": b"",
    "nothing but a string": b'"x"',
    "not a number": b'{"text": "a", "sampling_params": {"temperature": NaN}}',
    "infinity": b'{"text": "a", "sampling_params": {"temperature": Infinity}}',
    "huge number": b'{"text": "a", "sampling_params": {"temperature": 1e999}}',
    "invalid utf-8": b'{"text": "\xff"}',
    "lone surrogate": b'{"text": "\\ud800"}',
    "bottomless": b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "trailing comma": b'{"text": "a",}',
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED.keys())
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_malformed_bodies_are_the_callers_fault(harness: Harness, path: str, body: bytes) -> None:
    response = await harness.client.post(path, content=body, headers=JSON)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert isinstance(error, str if path == "/generate" else dict)


async def test_a_body_of_another_type_is_told_which_header_to_send(harness: Harness) -> None:
    response = await harness.client.post("/generate", content=b'{"text": "a"}')
    assert response.status_code == 400
    assert "Content-Type: application/json" in response.json()["error"]


async def test_a_charset_beside_the_type_is_fine(harness: Harness) -> None:
    headers = {"content-type": "application/json; charset=utf-8"}
    response = await harness.client.post("/generate", content=b'{"text": "a"}', headers=headers)
    assert response.status_code == 200


async def test_unknown_paths_and_methods_get_the_same_body(harness: Harness) -> None:
    response = await harness.client.get("/nowhere")
    assert (response.status_code, response.json()["error"]["type"]) == (404, "invalid_request_error")
    response = await harness.client.get("/generate")
    assert (response.status_code, response.headers["allow"]) in [(405, "POST"), (405, "PUT")]
    assert isinstance(response.json()["error"], str)


async def test_a_bug_is_a_500_that_tells_nothing() -> None:
    def broken(call: GenerateCall) -> None:
        raise ZeroDivisionError("secret")

    harness = Harness(broken)  # type: ignore[arg-type]
    response = await harness.post("/generate", {"text": "a"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.json()["code"] == "INTERNAL_ERROR"
    streamed = await harness.post("/v1/completions", {"prompt": "a", "stream": True})
    assert "secret" not in streamed.text
    assert "server_error" in streamed.text
