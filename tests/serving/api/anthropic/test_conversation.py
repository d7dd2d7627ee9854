from __future__ import annotations

from typing import Any

import pytest

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.api.anthropic.conversation import chat_of_messages
from shortfin_apps.llm.serving.api.anthropic.schema import MessagesBody
from shortfin_apps.llm.serving.api.schema import ChatBody
from shortfin_apps.llm.serving.dialects.choose import REASONING_DIALECTS
from shortfin_apps.llm.serving.dialects.dialect import NO_DIALECT, Dialect
from tests.serving.api.harness import TOKENIZER, Harness
from tests.serving.api.test_tools import TOKENIZER as THINKS_IF_TOLD

CALL: Any = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}
RESULT: Any = {"type": "tool_result", "tool_use_id": "1", "content": "sunny"}
THINKER = Dialect(reasoning=REASONING_DIALECTS["think"])


def text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def chat_of(*messages: Any, dialect: Dialect = NO_DIALECT, variable: bool = False, **fields: Any) -> ChatBody:
    """Of a model whose template has the variable `enable_thinking`, or has not."""
    harness = Harness(tokenizer=THINKS_IF_TOLD if variable else TOKENIZER, dialect=dialect)
    given = [{"role": role, "content": content} for role, content in messages] or [USER]
    body = MessagesBody.model_validate({"messages": given, "max_tokens": 9, **fields})
    return chat_of_messages(body, harness.service.model)


USER = {"role": "user", "content": "hi"}


def told(chat: ChatBody) -> list[dict[str, Any]]:
    return [message.model_dump(exclude_none=True) for message in chat.messages]


def test_a_system_prompt_comes_first() -> None:
    for system in ("Be\nkind.", [text("Be"), text("kind.")]):
        assert told(chat_of(system=system))[0] == {"role": "system", "content": "Be\nkind."}


def test_each_result_is_a_message_at_its_place() -> None:
    chat = chat_of(("assistant", [CALL]), ("user", [text("a"), RESULT, RESULT, text("b"), text("c")]))
    assert [(m["role"], m.get("content")) for m in told(chat)[1:]] == [
        ("user", "a"),
        ("tool", "sunny"),
        ("tool", "sunny"),
        ("user", "b\nc"),
    ]


def test_a_failed_result_is_marked_for_the_template() -> None:
    (message,) = told(chat_of(("user", [{**RESULT, "is_error": True}])))
    assert (message["tool_call_id"], message["is_error"]) == ("1", True)


def test_an_assistants_blocks_are_one_message() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    chat = chat_of(("assistant", [thought, text("so"), CALL, text("on")]), ("user", "x"))
    function = {"name": "f", "arguments": {"a": 1}}
    assert told(chat)[0] == {
        "role": "assistant",
        "content": "soon",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }


@pytest.mark.parametrize(
    "messages",
    [
        [("user", [CALL])],
        [("assistant", [RESULT]), ("user", "x")],
        [("system", [RESULT]), ("user", "x")],
        [("user", [{"type": "thinking", "thinking": "hm"}])],
    ],
)
def test_blocks_of_another_role_are_refused(messages: list[Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"has no block of type"):
        chat_of(*messages)


def test_the_beginning_of_an_answer_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"beginning is given in a last message of the assistant"):
        chat_of(("user", "hi"), ("assistant", "Once"))


def test_messages_without_content_stay_messages() -> None:
    assert told(chat_of(("user", []))) == [{"role": "user", "content": ""}]


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_tool_choices(choice: dict[str, Any], chosen: object) -> None:
    chat = chat_of(tools=[{"name": "f", "input_schema": {}}], tool_choice=choice)
    assert chat.model_dump(exclude_none=True)["tool_choice"] == chosen
    assert chat.parallel_tool_calls is None
    alone = chat_of(tool_choice={**choice, "disable_parallel_tool_use": True})
    assert alone.parallel_tool_calls is False


@pytest.mark.parametrize("choice", [{"type": "tool"}, {"type": "auto", "name": "f"}])
def test_a_tool_choice_with_a_name_too_many_or_too_few_is_refused(choice: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"goes with the type `tool`"):
        chat_of(tool_choice=choice)


def test_fields_with_two_names_are_refused_twice_given() -> None:
    with pytest.raises(InvalidRequestError, match=r"`stop` and `stop_sequences`"):
        chat_of(stop="a", stop_sequences=["a"])
    form = {"format": {"type": "json_schema", "schema": {}}}
    with pytest.raises(InvalidRequestError, match=r"`response_format` and `output_config.format`"):
        chat_of(response_format={"type": "text"}, output_config=form)


def test_the_user_is_the_chats() -> None:
    assert chat_of(metadata={"user_id": "alice"}).user == "alice"
    assert chat_of(stop_sequences=["a"], top_k=3).stop == ["a"]


@pytest.mark.parametrize(("kind", "thinks"), [("enabled", True), ("adaptive", True), ("disabled", False)])
def test_a_template_is_told_whether_to_think(kind: str, thinks: bool) -> None:
    chat = chat_of(thinking={"type": kind}, variable=True, dialect=THINKER)
    assert chat.chat_template_kwargs == {"enable_thinking": thinks}


@pytest.mark.parametrize(
    ("kind", "dialect", "refusal"),
    [
        ("enabled", NO_DIALECT, "does not think"),
        ("adaptive", NO_DIALECT, None),
        ("disabled", NO_DIALECT, None),
        ("enabled", THINKER, None),
        ("adaptive", THINKER, None),
        ("disabled", THINKER, "cannot be told not to think"),
    ],
)
def test_a_template_that_cannot_be_told(kind: str, dialect: Dialect, refusal: str | None) -> None:
    if refusal is None:
        assert chat_of(thinking={"type": kind}, dialect=dialect).chat_template_kwargs == {}
    else:
        with pytest.raises(InvalidRequestError, match=refusal):
            chat_of(thinking={"type": kind}, dialect=dialect)


def test_thoughts_may_be_left_out_of_the_answer() -> None:
    assert chat_of(thinking={"type": "adaptive", "display": "omitted"}).include_reasoning is False
