"""The events of a stream lead to the response that a whole answer is, however its text comes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.request.messages import FinishReason
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.contract.errors import ConstraintError, InvocationError
from shortfin_apps.llm.serving.api.chat import ChatTurn
from shortfin_apps.llm.serving.api.responses.answer import (
    ResponseAnswer,
    ResponseEvents,
    ResponseShape,
    ThoughtTokens,
)
from shortfin_apps.llm.serving.api.responses.schema import ResponsesBody
from shortfin_apps.llm.serving.frontend.text_stream import TextDelta, TextRequest
from shortfin_apps.llm.serving.text.tokenizer import LONG_TEXT
from tests.serving.api.harness import TOKENIZER
from tests.serving.api.test_answer_reader import HERMES, TEXTS


def count(texts: list[str]) -> int:
    counter = ThoughtTokens(TOKENIZER)
    for text in texts:
        counter.push(text)
    return counter.num_tokens


@given(st.lists(st.text(max_size=20), max_size=5), st.integers(0, 2 * LONG_TEXT))
def test_the_number_is_the_same_however_the_text_comes(texts: list[str], more: int) -> None:
    texts = [*texts, "the " * more]
    assert count(texts) == count(["".join(texts)])


def test_short_thoughts_are_tokenised_as_they_are() -> None:
    assert count(["the ", "end"]) == len(TOKENIZER.encode("the end", add_special_tokens=False))
    assert count([]) == 0


REQUEST = TextRequest(request_id="r", prompt_token_ids=(5, 6), params=SamplingParams(max_tokens=50))
REASONS = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])


def new_answer() -> ResponseAnswer:
    body = ResponsesBody(input="hi")
    shape = ResponseShape(body, REQUEST, code="c", created_at=1, model="m", is_stored=True)
    return ResponseAnswer(shape, ChatTurn(requests=[REQUEST], form=HERMES), TOKENIZER, lambda: 2.0)


def payloads(data: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: ")]


def without_call_ids(items: list[Any]) -> list[Any]:
    return [{name: value for name, value in item.items() if name != "call_id"} for item in items]


@given(pieces=TEXTS, size=st.integers(1, 9), reason=REASONS)
def test_events_lead_to_the_whole_response(pieces: list[str], size: int, reason: FinishReason) -> None:
    text = "".join(pieces)
    cut = [text[i : i + size] for i in range(0, len(text), size)] or [""]
    ended: list[Any] = []
    events = ResponseEvents(new_answer(), ended.append)
    data = events.first()
    for place, part in enumerate(cut, 1):
        last = reason if place == len(cut) else None
        data += events.of(0, TextDelta(part, (7,), finish_reason=last))
    told = payloads(data + events.last())
    assert [event["sequence_number"] for event in told] == list(range(len(told)))

    whole = new_answer()
    whole.add(TextDelta(text, (7,) * len(cut), finish_reason=reason))
    response, expected = told[-1]["response"], whole.response()
    assert ended == [response]
    for one in (response, expected):
        one["output"] = without_call_ids(one["output"])
    assert response == expected
    done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    assert without_call_ids(done) == response["output"]
    deltas: dict[int, str] = {}
    for event in told:
        if event["type"].endswith(".delta"):
            deltas[event["output_index"]] = deltas.get(event["output_index"], "") + event["delta"]
    texts = [item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in done]
    assert [deltas.get(index, "") for index in range(len(done))] == texts


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvocationError("broken"), "server_error"),
        (ConstraintError("broken"), "invalid_prompt"),
        (RuntimeError("broken"), "server_error"),
    ],
)
def test_a_failed_response_tells_the_callers_faults_from_the_servers(error: Exception, code: str) -> None:
    (event,) = payloads(ResponseEvents(new_answer(), lambda response: None).failed(error))
    assert event["response"]["error"]["code"] == code


def test_a_failed_response_has_what_came_before() -> None:
    events = ResponseEvents(new_answer(), lambda response: None)
    events.of(0, TextDelta("<think>hm</think>so", (7,)))
    (event,) = payloads(events.failed(InvocationError("broken")))
    response = event["response"]
    assert (response["status"], response["error"]["message"]) == ("failed", "broken")
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
