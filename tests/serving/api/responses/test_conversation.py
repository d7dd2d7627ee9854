from __future__ import annotations

from typing import Any

import pytest

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.api.responses.conversation import chat_of_response, messages_of
from shortfin_apps.llm.serving.api.responses.schema import ResponsesBody
from shortfin_apps.llm.serving.api.responses.store import ITEMS, items_of
from shortfin_apps.llm.serving.api.sampling import given_params
from shortfin_apps.llm.serving.api.schema import ChatBody, ChatMessage

USER = {"role": "user", "content": "hi"}
THOUGHT = {
    "type": "reasoning",
    "id": "rs",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}
ANSWER = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "1", "output": "sunny"}


def told(*items: Any) -> list[dict[str, Any]]:
    messages = messages_of(ITEMS.validate_python(list(items)))
    return [message.model_dump(exclude_none=True) for message in messages]


def chat_of(**fields: Any) -> ChatBody:
    body = ResponsesBody.model_validate({"input": "hi", **fields})
    return chat_of_response(body, items_of(body.input))


def test_what_one_answer_was_is_one_message() -> None:
    function = {"name": "f", "arguments": '{"a": 1}'}
    called = {"id": "1", "type": "function", "function": function}
    (_, answer, result) = told(USER, THOUGHT, ANSWER, CALL, CALL, RESULT)
    assert answer == {
        "role": "assistant",
        "content": "so",
        "reasoning_content": "hm",
        "tool_calls": [called, called],
    }
    assert result == {"role": "tool", "content": "sunny", "tool_call_id": "1"}


@pytest.mark.parametrize(
    ("items", "roles"),
    [
        ([CALL, RESULT, CALL, RESULT], ["assistant", "tool", "assistant", "tool"]),
        ([ANSWER, ANSWER], ["assistant", "assistant"]),
        ([THOUGHT, THOUGHT, ANSWER], ["assistant", "assistant"]),
        ([CALL, ANSWER], ["assistant", "assistant"]),
        ([THOUGHT, USER], ["assistant", "user"]),
        ([USER, {"role": "developer", "content": "x"}], ["user", "developer"]),
    ],
)
def test_other_items_are_messages_of_their_own(items: list[Any], roles: list[str]) -> None:
    assert [message["role"] for message in told(*items)] == roles


def test_a_thought_without_its_text_is_its_summary() -> None:
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "in short"}]}
    (message,) = told(summary)
    assert message["reasoning_content"] == "in short"


def test_parts_are_joined_and_refusals_are_text() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "no"}]
    (message,) = told({"role": "user", "content": parts})
    assert message["content"] == "a\nno"


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ("required", "required"),
        ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "f"}}],
                },
            },
        ),
    ],
)
def test_tool_choices(choice: object, chosen: object) -> None:
    chat = chat_of(tools=[{"type": "function", "name": "f"}], tool_choice=choice)
    assert chat.model_dump(exclude_none=True)["tool_choice"] == chosen


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"type": "text"}, {"type": "text"}),
        ({"type": "json_object"}, {"type": "json_object"}),
        (
            {"type": "json_schema", "name": "x", "schema": {"type": "object"}},
            {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        ),
    ],
)
def test_formats(form: dict[str, Any], expected: object) -> None:
    assert chat_of(text={"format": form}).response_format == expected


def test_fields_with_two_names_are_refused_twice_given() -> None:
    with pytest.raises(InvalidRequestError, match=r"`max_tokens` and `max_output_tokens`"):
        chat_of(max_tokens=1, max_output_tokens=1)
    with pytest.raises(InvalidRequestError, match=r"`response_format` and `text.format`"):
        chat_of(response_format={"type": "text"}, text={"format": {"type": "text"}})


def test_sampling_fields_of_other_routes_are_served() -> None:
    chat = chat_of(max_output_tokens=7, top_k=3, seed=1, user="alice", cache_salt="s")
    assert (chat.max_tokens, chat.user, chat.cache_salt) == (7, "alice", "s")
    assert given_params(chat)[0] == {"top_k": 3, "seed": 1}


def test_calls_are_added_to_a_message_without_copying_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assigned: list[str] = []

    def assign(message: ChatMessage, name: str, value: object) -> None:
        assigned.append(name)
        message.__dict__[name] = value

    monkeypatch.setattr(ChatMessage, "__setattr__", assign)
    _, answer = messages_of(ITEMS.validate_python([USER, *[CALL] * 100]))
    assert len(answer.tool_calls or ()) == 100
    assert len(assigned) <= 1
