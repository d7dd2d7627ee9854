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
def test_each_error_has_its_status(error: Exception, status: int) -> None:
    assert answer_to(error).status == status


def test_subclasses_precede_their_bases_in_the_table() -> None:
    kinds = [kind for kind, _ in ANSWERS]
    for i, kind in enumerate(kinds):
        assert not any(issubclass(later, kind) for later in kinds[i + 1 :])


async def test_a_wrong_content_type_names_the_right_one(harness: Harness) -> None:
    response = await harness.client.post("/generate", content=b'{"text": "a"}')
    assert response.status_code == 400
    assert "Content-Type: application/json" in response.json()["error"]


async def test_unknown_paths_and_methods_have_an_error_body(harness: Harness) -> None:
    response = await harness.client.get("/nowhere")
    assert (response.status_code, response.json()["error"]["type"]) == (404, "invalid_request_error")
    response = await harness.client.get("/generate")
    assert (response.status_code, response.headers["allow"]) in [(405, "POST"), (405, "PUT")]
    assert isinstance(response.json()["error"], str)


async def test_unexpected_errors_are_500_without_details() -> None:
    def broken(call: GenerateCall) -> None:
        raise ZeroDivisionError("secret")

    harness = Harness(broken)  # type: ignore[arg-type]
    response = await harness.post("/generate", {"text": "a"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.json()["code"] == "INTERNAL_ERROR"
    streamed = await harness.post("/v1/completions", {"prompt": "a", "stream": True})
    assert streamed.status_code == 500
    assert "secret" not in streamed.text
    assert streamed.json()["error"]["type"] == "server_error"
    assert streamed.headers["x-request-id"]
