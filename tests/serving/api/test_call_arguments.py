from __future__ import annotations

import json
import logging
from typing import Any
from unittest.mock import Mock

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shortfin_apps.llm.serving.api import call_arguments
from shortfin_apps.llm.serving.api.answer_reader import BlockReader, MessageReader
from shortfin_apps.llm.serving.api.anthropic.conversation import chat_of_messages
from shortfin_apps.llm.serving.api.anthropic.schema import MessagesBody
from shortfin_apps.llm.serving.api.anthropic.shapes import content_block
from shortfin_apps.llm.serving.api.call_arguments import (
    MAX_DEPTH,
    UNPARSED,
    arguments_in_history,
    read_arguments,
)
from shortfin_apps.llm.serving.api.limits import Limits
from shortfin_apps.llm.serving.api.responses.answer import ResponseShape
from shortfin_apps.llm.serving.api.responses.conversation import chat_of_response
from shortfin_apps.llm.serving.api.responses.schema import ResponsesBody
from shortfin_apps.llm.serving.api.responses.store import items_of
from shortfin_apps.llm.serving.api.schema import ChatBody
from shortfin_apps.llm.serving.api.tools import AnswerForm
from shortfin_apps.llm.serving.dialects.choose import REASONING_DIALECTS, TOOL_DIALECTS
from shortfin_apps.llm.serving.dialects.dialect import Dialect
from tests.serving.api.anthropic.test_shapes import OBJECTS
from tests.serving.api.harness import CHAT, MESSAGES
from tests.serving.api.test_tools import TOKENIZER, TOOLS, harness_of, prompt_of
from tests.serving.dialects.answers import ANSWERS, FUNCTIONS, Answer

DEEP = '{"a": ' * 99 + "1" + "}" * 99
LARGE = '{"a": %s}' % ("9" * 5000)
USER, QUESTION = {"role": "user", "content": "hi"}, {"type": "text", "text": "And?"}
# As a model may write arguments when no grammar holds it.
WRITTEN = [
    *('{"a": "x"}', '{"a": 1,}', '{"a": [1, ], }', '{"a": "x\ny"}', '{"a": "\\ud83d\\ude00"}'),
    '{"a": "\\ud83d"}',
    *("[1]", "7", '"{}"', '{"a": {"b": 10000000000000000000000}}', '{"a": NaN}', DEEP, LARGE, '{"a": True}'),
]  # fmt: skip
ALL_ANSWERS = [
    *ANSWERS,
    *(
        Answer("hermes", "think", f'<think>hm</think><tool_call>{{"name": "now", "arguments": {each}}}', [])
        for each in WRITTEN
    ),
]
FORMS = {
    each.tools: AnswerForm(
        dialect=Dialect(TOOL_DIALECTS[each.tools], REASONING_DIALECTS["think"]), functions=FUNCTIONS
    )
    for each in ANSWERS
    if each.tools is not None
}


def sent_back(value: Any) -> Any:
    """What a client sends of an answer that it got, if a body may have it."""
    value = orjson.loads(orjson.dumps(value))
    Limits().check_json({"messages": [value]})
    return value


def chat_history(form: AnswerForm, text: str) -> ChatBody:
    message = sent_back(MessageReader(form).message(text))
    results = [{"role": "tool", "tool_call_id": call["id"]} for call in message.get("tool_calls", ())]
    return ChatBody.model_validate({"messages": [USER, message, *results, USER]})


def responses_history(form: AnswerForm, text: str) -> ChatBody:
    shape = ResponseShape(Mock(), Mock(), code="c", created_at=0, model="m", is_stored=False)
    blocks = BlockReader(form).read_whole(text)
    output = sent_back([shape.item(block, "incomplete") for block in blocks])
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "cut"}
        for item in output
        if item["type"] == "function_call"
    ]
    body = ResponsesBody.model_validate({"input": [USER, *output, *results, USER]})
    return chat_of_response(body, items_of(body.input))


def messages_history(form: AnswerForm, text: str) -> ChatBody:
    content = sent_back([content_block(block) for block in BlockReader(form).read_whole(text)])
    results = [{"type": "tool_result", "tool_use_id": c["id"]} for c in content if c["type"] == "tool_use"]
    answered = {"role": "assistant", "content": content}
    messages = [USER, answered, {"role": "user", "content": [*results, QUESTION]}]
    return chat_of_messages(MessagesBody.model_validate({"max_tokens": 1, "messages": messages}), Mock())


@pytest.mark.parametrize("history", [chat_history, responses_history, messages_history])
@given(st.sampled_from(ALL_ANSWERS), st.floats(0, 1))
@example(Answer("hermes", None, f'<tool_call>{{"name": "now", "arguments": {DEEP}}}', []), 1.0)
@example(Answer("hermes", None, f'<tool_call>{{"name": "now", "arguments": {LARGE}}}', []), 1.0)
def test_every_answer_cut_anywhere_may_be_sent_back(history: Any, answer: Answer, share: float) -> None:
    form = FORMS[answer.tools or "hermes"]
    chat = history(form, answer.text[: round(share * len(answer.text))])
    messages = [message.for_template() for message in chat.messages]
    assert TOKENIZER.apply_chat_template(messages)
    for message in messages:
        assert all(isinstance(call["function"]["arguments"], dict) for call in message.get("tool_calls", ()))


async def test_the_model_is_shown_its_cut_call_as_far_as_it_came() -> None:
    harness = harness_of("ok")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "x\ny'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "cut"},
    ]
    response = await harness.post(CHAT, {"messages": messages, "tools": TOOLS})
    assert response.status_code == 200
    assert '{"name": "f", "arguments": {"a": "x\\ny"}}[tool]cut' in prompt_of(harness)


async def test_arguments_count_against_the_limit_of_characters() -> None:
    function = {"name": "f", "arguments": '"' * 1_000_001}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [{"function": function}]}]
    response = await harness_of("ok").post(CHAT, {"messages": messages})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")


@given(OBJECTS)
def test_arguments_are_the_object_that_their_text_is(arguments: dict[str, Any]) -> None:
    text = json.dumps(arguments)
    assert arguments_in_history(text) == read_arguments(text, allow_partial=True) == arguments


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", {}),
        (" \n", {}),
        ("null", {}),
        ('{"a": 1,}', {"a": 1}),
        ('{"a": [1, 2 , ] ,\n}', {"a": [1, 2]}),
        ('{"a": ",}", "b": "\\",]",}', {"a": ",}", "b": '",]'}),
        ('{"a": "x\r\n\ty", "b', {"a": "x\r\n\ty"}),
        ('{"a": "x\\', {"a": "x"}),
        ('{"a": "x", "b": tr', {"a": "x"}),
        ("[1]", {UNPARSED: "[1]"}),
        ("x", {UNPARSED: "x"}),
        (DEEP, {UNPARSED: DEEP}),
        ("[" * 10_000, {UNPARSED: "[" * 10_000}),
    ],
)
def test_arguments_that_are_not_quite_json(text: str, arguments: dict[str, Any]) -> None:
    assert arguments_in_history(text) == arguments


def test_arguments_nest_as_deep_as_a_body_may() -> None:
    text = '{"a": ' * MAX_DEPTH + "1" + "}" * MAX_DEPTH
    assert UNPARSED not in arguments_in_history(text)
    assert UNPARSED in arguments_in_history('{"b": ' + text + "}")


def test_the_log_says_once_that_arguments_were_mended(caplog: pytest.LogCaptureFixture) -> None:
    call_arguments._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        arguments_in_history('{"a": 1}')
        assert not caplog.records
        for _ in range(2):
            arguments_in_history('{"a": "secret')
    (record,) = caplog.records
    assert "not a JSON object" in record.message
    assert "secret" not in record.message
