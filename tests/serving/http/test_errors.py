from __future__ import annotations

from typing import Any

import pytest
from starlette.requests import Request

from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.contract.errors import (
    InvalidRequestError,
    InvocationError,
    LlmError,
    OverloadedError,
    RequestAbortedError,
    UnavailableError,
)
from shortfin_apps.llm.serving.http.errors import ANSWERS, answer_to, openai_shape, shape_of
from tests.serving.api.harness import (
    CHAT,
    COMPLETIONS,
    MAX_SEQ_LEN,
    MESSAGES,
    MESSAGES_ROUTE,
    RESPONSES,
    Harness,
)


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


@pytest.mark.parametrize(
    ("method", "path", "advice"),
    [
        ("POST", "/chat/completions", "did you mean /v1/chat/completions?"),
        ("POST", "/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("GET", "/models", "did you mean /v1/models?"),
        ("POST", "/v1/embeddings", "/docs lists the routes"),
        ("GET", "/v1/no" + "/models" * 50, "/docs lists the routes"),
        ("GET", "/v1/chat/completions", "use POST"),
    ],
)
async def test_a_wrong_path_or_method_is_told_what_to_do(
    method: str, path: str, advice: str, harness: Harness
) -> None:
    response = await harness.client.request(method, path)
    assert response.status_code == (405 if advice == "use POST" else 404)
    assert response.json()["error"]["message"].endswith(f"; {advice}")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES_ROUTE])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", "the body is empty; send a JSON object"),
        *((text, "the body: Input should be a JSON object") for text in ("[]", '"hi"', "null", "5")),
    ],
)
async def test_a_body_that_is_no_object_is_named(
    path: str, body: str, message: str, harness: Harness
) -> None:
    headers = {"Content-Type": "application/json"}
    response = await harness.client.post(path, content=body, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == message


async def test_a_field_that_is_no_object_is_named(harness: Harness) -> None:
    body = {"prompt": "a", "stream": True, "stream_options": True}
    error = (await harness.client.post(COMPLETIONS, json=body)).json()["error"]
    assert error["message"] == "`stream_options`: Input should be a JSON object"


LONG = "7 " * MAX_SEQ_LEN


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": LONG}, "prompt"),
        (COMPLETIONS, {"prompt": "7" * 900_000}, "prompt"),
        (COMPLETIONS, {"prompt": [1] * (MAX_SEQ_LEN + 1), "echo": True, "max_tokens": 0}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": MAX_SEQ_LEN}, "max_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        (CHAT, {"messages": MESSAGES, "max_completion_tokens": MAX_SEQ_LEN}, "max_completion_tokens"),
        (RESPONSES, {"input": LONG}, "input"),
        (RESPONSES, {"input": "a", "max_output_tokens": MAX_SEQ_LEN}, "max_output_tokens"),
    ],
)
async def test_clients_recognise_a_request_that_exceeds_the_context(
    path: str, body: dict[str, Any], param: str, harness: Harness
) -> None:
    response = await harness.client.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)


async def test_anthropics_clients_recognise_a_prompt_that_exceeds_the_context(harness: Harness) -> None:
    body = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 9}
    error = (await harness.client.post(MESSAGES_ROUTE, json=body)).json()["error"]
    assert error["message"].startswith("prompt is too long: `messages` has")
    body["messages"] = []
    error = (await harness.client.post(MESSAGES_ROUTE, json=body)).json()["error"]
    assert error["message"].startswith("`messages`")


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


def chat(content: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 9}


TOOLS = [{"type": "function", "function": {"name": "f"}}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:x"}}


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        (CHAT, chat([IMAGE]), "messages.content", "images, audio and files are not supported"),
        (CHAT, chat([IMAGE]), "messages.content", "this one is of type `image_url`"),
        (CHAT, chat([{"type": "text", "text": "a"}, {}]), "messages.content", "must be of type `text`"),
        (CHAT, chat([{"type": "text"}]), "messages.content.text", "Field required"),
        (CHAT, chat([{"type": "text", "text": 5}]), "messages.content.text", "should be a valid string"),
        (CHAT, chat(5), "messages.content", "should be a valid string"),
        (RESPONSES, {"input": chat([{"type": "input_image"}])["messages"]}, "input.content", "`input_image`"),
        (RESPONSES, {"input": chat([{"type": "input_text"}])["messages"]}, "input.content.text", "required"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "1"}]}, "input", "`item_reference`"),
        (MESSAGES_ROUTE, chat([{"type": "image", "source": {}}]), None, "this one is of type `image`"),
        (MESSAGES_ROUTE, chat([{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}]),
         None, "images, documents and other blocks are not supported"),
        (MESSAGES_ROUTE, {**chat("hi"), "system": [{"type": "text"}]}, None, "`system.text`: Field required"),
        (MESSAGES_ROUTE, {**chat("hi"), "system": [{}]}, None, "`system.type`: Field required"),
        (MESSAGES_ROUTE, chat([{"type": "text"}]), None, "`messages[0].content.text`: Field required"),
        *(
            (path, {**body, "tools": tools, "tool_choice": choice}, param, said)
            for path, body, tools in (
                (CHAT, {"messages": MESSAGES}, TOOLS),
                (RESPONSES, {"input": "hi"}, [{"type": "function", "name": "f"}]),
            )
            for choice, param, said in (
                ({"function": {"name": "f"}}, "tool_choice.type", "Field required"),
                ({"type": "custom", "custom": {"name": "f"}}, "tool_choice.type", "should be 'function'"),
                ("any", "tool_choice", "should be 'none', 'auto' or 'required'"),
            )
        ),
        (CHAT, {"messages": MESSAGES, "tools": TOOLS, "tool_choice": {"type": "function"}},
         "tool_choice.function", "Field required"),
        (CHAT, {"messages": MESSAGES, "tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": []}},
         "tool_choice.allowed_tools", "Field required"),
        (RESPONSES, {"input": "hi", "tool_choice": {"type": "allowed_tools", "tools": []}},
         "tool_choice.mode", "Field required"),
        (COMPLETIONS, {"prompt": "a", "stop": [5]}, "stop", "should be a valid string"),
        (COMPLETIONS, {"prompt": {}}, "prompt", "should be a valid string; or"),
        (COMPLETIONS, {"prompt": ["a", 5]}, "prompt", "`prompt`: Input should be"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 10**20}, "max_tokens", "integer of at most 64 bits"),
        (CHAT, {"messages": [MESSAGES[0], {"content": "a"}]}, "messages.role", "`messages[1].role`:"),
        ("/tokenize", {}, None, "the body: give exactly one of `prompt` and `messages`"),
        (COMPLETIONS, {"prompt": "a", "n": "x", "logit_bias": {"5": []}}, "n", "valid integer"),
    ],
)  # fmt: skip
async def test_an_error_names_the_part_that_is_wrong(
    harness: Harness, path: str, body: Any, param: str | None, said: str
) -> None:
    """Of values with several types, it is that of the type that was meant."""
    response = await harness.post(path, body)
    error = response.json()["error"]
    assert (response.status_code, error.get("param")) == (400, param), error
    assert said in error["message"]


def test_the_longest_path_gives_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {end: lambda _, end=end: {"path": end} for end in ("/x", "/a/x")}
    monkeypatch.setattr("shortfin_apps.llm.serving.http.errors._SHAPES", shapes)
    for path, end in (("/x", "/x"), ("/prefix/x", "/x"), ("/prefix/a/x", "/a/x")):
        assert shape_of(Request({"type": "http", "path": path, "headers": []})) is shapes[end]
    assert shape_of(Request({"type": "http", "path": "/y", "headers": []})) is openai_shape
