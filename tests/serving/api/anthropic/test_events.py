"""The events of a stream lead to the message that a whole answer is, however its text comes."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.serving.api.anthropic.shapes import MessageEvents, arguments_of, content_block
from shortfin_apps.llm.serving.api.blocks import BlockReader
from shortfin_apps.llm.serving.api.chat import ChatTurn
from shortfin_apps.llm.serving.frontend.text_stream import TextDelta
from tests.serving.api.responses.test_events import REASONS, REQUEST, payloads
from tests.serving.api.test_blocks import HERMES, TEXTS

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
