"""The events of a stream lead to the message that a whole answer is, however its text comes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.serving.api.answer_reader import BlockReader
from shortfin_apps.llm.serving.api.anthropic.shapes import (
    MessageEvents,
    arguments_of,
    content_block,
    usage_of,
)
from shortfin_apps.llm.serving.api.call_arguments import UNPARSED
from shortfin_apps.llm.serving.api.chat import ChatTurn
from shortfin_apps.llm.serving.frontend.text_stream import TextDelta
from tests.serving.api.responses.test_answer import REASONS, REQUEST, payloads
from tests.serving.api.test_answer_reader import HERMES, TEXTS

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)
OBJECTS = st.dictionaries(st.text(max_size=3), VALUES, max_size=4)


@given(OBJECTS)
def test_arguments_are_the_object_that_the_model_wrote(arguments: dict[str, object]) -> None:
    assert arguments_of(json.dumps(arguments)) == arguments


@given(OBJECTS, st.integers(1, 100))
def test_arguments_that_are_cut_have_names_of_the_whole(arguments: dict[str, object], length: int) -> None:
    cut = arguments_of(json.dumps(arguments)[:length])
    assert cut.keys() <= arguments.keys() | {UNPARSED}


@pytest.mark.parametrize("text", ["nonsense", "[1]", "7", '{"a" 1}'])
def test_other_arguments_are_handed_on_as_text(text: str) -> None:
    assert arguments_of(text) == {UNPARSED: text}


def test_no_arguments_are_an_empty_object() -> None:
    assert arguments_of("") == {}


@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
def test_the_parts_of_a_prompt_add_up(cached: int, more: int, output: int) -> None:
    usage = usage_of(cached + more, cached, output)
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == cached + more
    assert usage["output_tokens"] == output


FIELDS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


@given(pieces=TEXTS, size=st.integers(1, 9), reason=REASONS, cached=st.integers(0, 2))
def test_events_lead_to_the_whole_message(pieces: list[str], size: int, reason: Any, cached: int) -> None:
    text = "".join(pieces)
    cut = [text[i : i + size] for i in range(0, len(text), size)] or [""]
    turn = ChatTurn(requests=[REQUEST], form=HERMES)
    events = MessageEvents({"id": "msg_1", "model": "m"}, turn)
    data = events.first()
    for place, part in enumerate(cut, 1):
        last = reason if place == len(cut) else None
        data += events.of(0, TextDelta(part, (7,), num_cached_tokens=cached, finish_reason=last))
    told = payloads(data + events.last())

    begun: list[Any] = []
    grown: list[str] = []
    open_index: int | None = None
    for event in told:
        match event["type"]:
            case "content_block_start":
                assert open_index is None
                open_index = event["index"]
                assert open_index == len(begun)
                begun.append(event["content_block"])
                grown.append("")
            case "content_block_delta":
                assert event["index"] == open_index
                grown[-1] += event["delta"][FIELDS[event["delta"]["type"]]]
            case "content_block_stop":
                assert event["index"] == open_index
                open_index = None
    for block, text_of_block in zip(begun, grown, strict=True):
        name = {"text": "text", "thinking": "thinking", "tool_use": "input"}[block["type"]]
        block[name] = arguments_of(text_of_block) if name == "input" else text_of_block
    whole = [content_block(block) for block in BlockReader(HERMES).read_whole(text)]
    assert json.dumps(without_ids(begun)) == json.dumps(without_ids(whole))
    (end,) = (event for event in told if event["type"] == "message_delta")
    assert end["usage"]["input_tokens"] + end["usage"]["cache_read_input_tokens"] == 2
    assert end["usage"]["output_tokens"] == len(cut)


def without_ids(blocks: list[Any]) -> list[Any]:
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]
