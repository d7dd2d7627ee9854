from __future__ import annotations

from typing import Any

import pytest

from shortfin_apps.llm.client import (
    Chunk,
    Generation,
    ServerError,
    ToolCall,
    ToolCallDelta,
    Usage,
    join_calls,
)
from shortfin_apps.llm.client.answers import parse_chunk, parse_generation
from tests.scripted_server import usage


def test_a_completion_is_parsed() -> None:
    choice = {"text": " Paris", "finish_reason": "stop", "token_ids": [5, 6]}
    body = {"choices": [choice], "usage": usage(4, 2, 3)}
    assert parse_generation(body) == Generation(" Paris", "stop", Usage(4, 2, 3), (5, 6))


def test_a_chat_answer_is_parsed() -> None:
    body = {"choices": [{"message": {"role": "assistant", "content": None}, "finish_reason": "length"}]}
    assert parse_generation(body) == Generation("", "length", None)


@pytest.mark.parametrize(
    ("event", "chunk"),
    [
        ({"choices": [{"text": "a", "finish_reason": None}]}, Chunk("a")),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, Chunk("")),
        ({"choices": [{"delta": {}, "finish_reason": "stop"}]}, Chunk("", "stop")),
        ({"choices": [], "usage": usage(4, 2)}, Chunk("", usage=Usage(4, 2))),
        ({"choices": [{"text": "a", "token_ids": [1]}]}, Chunk("a", token_ids=(1,))),
        ({"choices": [], "usage": {"prompt_tokens": 4}}, Chunk("", usage=Usage(4, 0))),
    ],
)
def test_chunks_of_either_route_are_parsed(event: Any, chunk: Chunk) -> None:
    assert parse_chunk(event) == chunk


@pytest.mark.parametrize("body", [None, [], {}, {"choices": [{}]}, {"choices": [None]}, {"choices": "x"}, 3])
def test_anything_else_is_a_server_error(body: Any) -> None:
    with pytest.raises(ServerError):
        parse_generation(body)
    with pytest.raises(ServerError):
        parse_chunk(body)


WRONG_CALLS: list[dict[str, Any]] = [
    {"index": []},
    {"id": 1},
    {"function": {"name": {}}},
    {"function": {"arguments": ["a"]}},
]
WRONG_TYPES: list[dict[str, Any]] = [
    *({"choices": [{"text": value}]} for value in (1, ["a"], {"a": 1})),
    {"choices": [{"text": "a", "finish_reason": 3}]},
    *({"choices": [{"text": "a"}], "usage": usage} for usage in ("x", {"prompt_tokens": "1"})),
    {"choices": [{"text": "a"}], "usage": {"prompt_tokens": 1, "completion_tokens": "2"}},
    {"choices": [{"delta": {"reasoning": 1}}]},
    *({"choices": [{"delta": {"content": "a", "tool_calls": [call]}}]} for call in WRONG_CALLS),
]


@pytest.mark.parametrize("body", WRONG_TYPES)
def test_values_of_other_types_are_a_server_error(body: Any) -> None:
    with pytest.raises(ServerError):
        parse_chunk(body)
    if "delta" not in body["choices"][0]:
        with pytest.raises(ServerError):
            parse_generation(body)


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_calls_and_reasoning_are_parsed() -> None:
    message = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL, CALL]}
    answer = parse_generation({"choices": [{"message": message, "finish_reason": "tool_calls"}]})
    assert (answer.text, answer.reasoning) == ("", "hm")
    assert answer.tool_calls == (ToolCall("c", "f", "{}"),) * 2
    assert answer.tool_calls[0].message == CALL


def test_calls_of_chunks_are_joined() -> None:
    deltas = [
        {"reasoning": "hm", "tool_calls": [{"index": 0, **CALL, "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}, {"index": 1, **CALL}]},
    ]
    chunks = [parse_chunk({"choices": [{"delta": delta}]}) for delta in deltas]
    assert chunks[0].reasoning == "hm"
    assert (
        join_calls(call for chunk in chunks for call in chunk.tool_calls) == (ToolCall("c", "f", "{}"),) * 2
    )
    with pytest.raises(ServerError):
        join_calls([ToolCallDelta(0, "{}")])
