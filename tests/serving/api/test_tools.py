from __future__ import annotations

import asyncio
import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from shortfin_apps.llm.components.grammar.compiler import GrammarCompiler
from shortfin_apps.llm.components.grammar.source import MAX_CHARS, GrammarKind, GrammarSource
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.api.schema import ChatBody
from shortfin_apps.llm.serving.api.tools import ToolUse, answer_rules
from shortfin_apps.llm.serving.dialects.choose import REASONING_DIALECTS, TOOL_DIALECTS
from shortfin_apps.llm.serving.dialects.dialect import Dialect, Function
from tests.serving.api.harness import CHAT, MESSAGES, Harness, events_of
from tests.serving.api.scripted_engine import saying
from tests.serving.dialects.matching import lets_through
from tests.serving.text.tiny_tokenizers import BOS, byte_level_backend, byte_level_tokenizer

TEMPLATE = (
    "{% for tool in tools or () %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.reasoning_content }}"
    "{% for call in m.tool_calls or () %}{{ call.function | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking %}<think>{% endif %}{% endif %}"
)
TOKENIZER = byte_level_tokenizer(chat_template=TEMPLATE)
HERMES = Dialect(TOOL_DIALECTS["hermes"], REASONING_DIALECTS["think"])
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "f", "parameters": PARAMETERS, "strict": True}},
    {"type": "function", "function": {"name": "g"}},
]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "g"}}


def harness_of(text: str, dialect: Dialect = HERMES) -> Harness:
    return Harness(saying(TOKENIZER, text), tokenizer=TOKENIZER, dialect=dialect, max_seq_len=1000)


async def message_of(harness: Harness, **fields: Any) -> tuple[dict[str, Any], str]:
    """The message of an answer and its finish reason; the deltas of a stream are joined."""
    response = await harness.post(CHAT, {"messages": MESSAGES, **fields})
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        [choice] = response.json()["choices"]
        return choice["message"], choice["finish_reason"]
    choices = [choice for event in events_of(response) for choice in event["choices"]]
    message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
    for delta in (choice["delta"] for choice in choices):
        for name in ("content", "reasoning_content", "reasoning"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                calls.append({k: v for k, v in call.items() if k != "index"})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    if "tool_calls" in message:
        message["content"] = message["content"] or None
    return message, choices[-1]["finish_reason"]


def prompt_of(harness: Harness) -> str:
    return TOKENIZER.decode(harness.engine.calls[-1].prompt_token_ids, skip_special_tokens=False)


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_are_answered_in_openais_form(stream: bool) -> None:
    harness = harness_of(f"<think>hm</think>Sure.\n{CALL}\n{CALL}")
    message, reason = await message_of(harness, tools=TOOLS, stream=stream)
    assert reason == "tool_calls"
    ids = [call.pop("id") for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(call_id.startswith("call_") for call_id in ids)
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert message == {
        "role": "assistant",
        "content": "Sure.",
        "refusal": None,
        "reasoning_content": "hm",
        "reasoning": "hm",
        "tool_calls": [call, call],
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_content_is_null_beside_calls_alone(stream: bool) -> None:
    message, _ = await message_of(harness_of(CALL), tools=TOOLS, stream=stream)
    assert message["content"] is None
    assert "reasoning_content" not in message
    assert "reasoning" not in message


@pytest.mark.parametrize("fields", [
    {"reasoning_content": "hm"}, {"reasoning": "hm"}, {"reasoning_content": "hm", "reasoning": "hm"},
    {"reasoning_content": "hm", "reasoning": None}, {"reasoning_content": "", "reasoning": "hm"},
])  # fmt: skip
async def test_a_thought_has_two_names(fields: dict[str, str]) -> None:
    harness = harness_of("the end")
    messages = [*MESSAGES, {"role": "assistant", "content": "a", **fields}, *MESSAGES]
    response = await harness.post(CHAT, {"messages": messages})
    assert response.status_code == 200
    assert prompt_of(harness) == "[user]hi[assistant]ahm[user]hi[assistant]"


async def test_two_thoughts_of_one_message_are_refused() -> None:
    message = {"role": "assistant", "reasoning": "a", "reasoning_content": "b"}
    response = await harness_of("the end").post(CHAT, {"messages": [*MESSAGES, message]})
    assert response.status_code == 400
    assert "disagree" in response.json()["error"]["message"]


async def test_arguments_are_streamed_as_they_are_generated() -> None:
    harness = harness_of(CALL.replace("1", '"a word and others"'))
    response = await harness.post(CHAT, {"messages": MESSAGES, "tools": TOOLS, "stream": True})
    deltas = [event["choices"][0]["delta"] for event in events_of(response)]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0] * len(calls)
    assert calls[0]["function"]["name"] == "f"
    assert len(calls) > 5
    assert all("id" not in call and "name" not in call["function"] for call in calls[1:])


async def test_a_cut_call_is_no_call_to_run() -> None:
    message, reason = await message_of(
        harness_of(CALL), tools=TOOLS, max_tokens=len(TOKENIZER.encode(CALL)) - 16
    )
    assert reason == "length"
    assert message["tool_calls"][0]["function"]["arguments"] != '{"a": 1}'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"tool_choice": NAMED}, {}], ids=str)
async def test_only_an_optional_call_may_become_content_when_it_is_cut(
    fields: dict[str, Any], stream: bool
) -> None:
    harness = harness_of("<think>hm</think>" + CALL.replace('"f"', '"g"'))
    for max_tokens in (4, 20, 25, 30):
        body = {"tools": TOOLS, "max_tokens": max_tokens, "stream": stream, **fields}
        message, reason = await message_of(harness, **body)
        assert reason == "length"
        assert "tool_calls" not in message
        assert bool(message["content"]) == (not fields)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", range(len(CALL) - len("1}}\n</tool_call>"), len(CALL), 3))
async def test_a_call_that_the_model_ends_early_has_arguments_that_parse(end: int, stream: bool) -> None:
    message, reason = await message_of(harness_of(CALL[:end]), tools=TOOLS, stream=stream)
    assert reason == "tool_calls"
    assert isinstance(json.loads(message["tool_calls"][0]["function"]["arguments"]), dict)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_in_a_thought_without_end_is_a_call(stream: bool) -> None:
    message, reason = await message_of(harness_of(f"<think>hm {CALL}"), tools=TOOLS, stream=stream)
    assert (reason, message["reasoning_content"], message["content"]) == ("tool_calls", "hm", None)
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


async def test_a_call_in_a_thought_is_a_draft_where_a_grammar_makes_one_follow() -> None:
    harness = harness_of(f"<think>hm {CALL}</think>{CALL}")
    message, _ = await message_of(harness, tools=TOOLS, tool_choice="required")
    assert (message["reasoning_content"], len(message["tool_calls"])) == (f"hm {CALL}", 1)


async def test_only_one_call_is_answered_without_parallel_calls() -> None:
    message, _ = await message_of(harness_of(CALL + CALL), tools=TOOLS, parallel_tool_calls=False)
    assert len(message["tool_calls"]) == 1


async def test_the_model_is_shown_the_tools_and_the_calls() -> None:
    """Arguments are an object in templates, and a text in OpenAI's messages."""
    harness = harness_of("the end")
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "2"}]},
    ]
    body = {"messages": messages, "tools": TOOLS}
    assert (await harness.post(CHAT, body)).status_code == 200
    shown = [json.dumps({"type": "function", "function": f}) for f in (
        {"name": "f", "parameters": PARAMETERS}, {"name": "g"})]  # fmt: skip
    call = '{"name": "f", "arguments": {"a": 1}}'
    prompt = f"{''.join(shown)}[user]hi[assistant]hm{call}[tool]2[assistant]"
    assert prompt_of(harness) == prompt
    tokenized = await harness.post("/tokenize", body)
    assert tokenized.json()["tokens"] == list(harness.engine.calls[0].prompt_token_ids)


async def test_a_tool_choice_of_none_shows_no_tools_and_parses_none() -> None:
    harness = harness_of(CALL)
    message, reason = await message_of(harness, tools=TOOLS, tool_choice="none")
    assert (message["content"], reason) == (CALL, "stop")
    assert prompt_of(harness) == "[user]hi[assistant]"


@pytest.mark.parametrize(
    ("choice", "functions"),
    [
        ("required", ["f", "g"]),
        (NAMED, ["g"]),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}, ["g"]),
    ],
)
async def test_a_call_that_must_be_has_a_grammar(choice: object, functions: list[str]) -> None:
    harness = harness_of(CALL)
    await message_of(harness, tools=TOOLS, tool_choice=choice)
    grammar = harness.engine.calls[0].params.output_grammar
    assert grammar is not None
    texts = {name: f'<tool_call>\n{{"name": "{name}"' for name in ("f", "g")}
    matching = [name for name in texts if lets_through(grammar, TOKENIZER, texts[name], to_the_end=False)]
    assert matching == functions


async def test_names_of_functions_may_be_long() -> None:
    """Those of MCP servers have their server's name in front."""
    name = "mcp__server__" + "a" * 243
    tool = {"type": "function", "function": {"name": name}}
    choice = {"type": "function", "function": {"name": name}}
    text = f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'
    message, _ = await message_of(harness_of(text), tools=[tool], tool_choice=choice)
    assert message["tool_calls"][0]["function"]["name"] == name


async def test_a_call_that_may_be_has_no_grammar_without_a_strict_function() -> None:
    harness = harness_of(CALL)
    await message_of(harness, tools=[{"type": "function", "function": {"name": "g"}}])
    assert harness.engine.calls[0].params.output_grammar is None


async def test_a_call_that_may_be_has_to_fit_beside_a_strict_function() -> None:
    harness = harness_of(CALL)
    await message_of(harness, tools=TOOLS)
    grammar = harness.engine.calls[0].params.output_grammar
    assert grammar is not None
    assert lets_through(grammar, TOKENIZER, "It is 2 < 3.")
    assert lets_through(grammar, TOKENIZER, f"Well: {CALL}")
    unknown = 'Well: <tool_call>\n{"name": "h"'
    assert not lets_through(grammar, TOKENIZER, unknown, to_the_end=False)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": "required"}, "tool_choice", "needs `tools`"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice", "`h`"),
    ({"tools": [*TOOLS, TOOLS[0]]}, "tools", "several functions `f`"),
    ({"tools": TOOLS, "regex": "a"}, "regex", "leave one of them out"),
    ({"tools": TOOLS, "tool_choice": "required", "regex": "a"}, "regex", "leave one of them out"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.function.name", "pattern"),
    ({"tools": [{"type": "function", "function": {"name": "a" * 257}}]}, "tools.function.name", "pattern"),
    ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools.type", "function"),
    ({"tools": TOOLS * 65}, "tools", "128"),
    ({"functions": [{}]}, "functions", "use `tools`"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "not known"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "strict": True,
                       "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}}],
            "tool_choice": "required",
        },
        "tools",
        "cannot be used",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "reason"), REFUSED)
async def test_tools_that_cannot_be_served_are_refused(
    fields: dict[str, Any], param: str, reason: str
) -> None:
    harness = harness_of(CALL)
    response = await harness.post(CHAT, {"messages": MESSAGES, **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert reason in error["message"]
    assert not harness.engine.calls


async def test_a_model_without_a_form_of_calls_refuses_tools() -> None:
    response = await Harness().post(CHAT, {"messages": MESSAGES, "tools": TOOLS})
    assert response.status_code == 400
    assert "--tool-parser" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_thought_that_the_template_opens_is_reasoning(stream: bool) -> None:
    harness = harness_of("hm\n</think>\n\nthe end")
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    message, reason = await message_of(harness, **thinking, stream=stream)
    assert prompt_of(harness).endswith("[assistant]<think>")
    assert (message["reasoning_content"], message["content"], reason) == ("hm", "the end", "stop")
    plain, _ = await message_of(harness, stream=stream)
    assert plain["content"] == "hm\n</think>\n\nthe end"


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_left_out_or_left_in_place(stream: bool) -> None:
    harness = harness_of("<think>hm</think>the end")
    without, _ = await message_of(harness, include_reasoning=False, stream=stream)
    assert without == {"role": "assistant", "content": "the end", "refusal": None}
    unparsed, _ = await message_of(harness, separate_reasoning=False, stream=stream)
    assert unparsed["content"] == "<think>hm</think>the end"


@pytest.mark.parametrize(
    ("fields", "fitting", "other"),
    [
        ({}, ["hm</think>\n{}", "</think>{}"], ["{}"]),
        ({"tools": TOOLS}, ["hm</think>{}", f"hm</think>{CALL}"], ["hm</think>Sure."]),
        ({"tools": TOOLS, "tool_choice": "required"}, [f"hm</think>{CALL}"], ["hm</think>{}"]),
    ],
)
async def test_a_format_of_json_applies_behind_a_thought(
    fields: dict[str, Any], fitting: list[str], other: list[str]
) -> None:
    harness = harness_of('hm</think>{"a": 1}')
    body = {"response_format": {"type": "json_object"}, "chat_template_kwargs": {"enable_thinking": True}}
    message, _ = await message_of(harness, **body, **fields)
    assert (message["reasoning_content"], message["content"]) == ("hm", '{"a": 1}')
    grammar = harness.engine.calls[0].params.output_grammar
    assert grammar is not None
    assert all(lets_through(grammar, TOKENIZER, text) for text in fitting)
    assert not any(lets_through(grammar, TOKENIZER, text) for text in other)


async def test_a_format_of_json_applies_in_the_final_channel() -> None:
    text = '<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>{"a": 1}'
    harness = harness_of(text, Dialect(TOOL_DIALECTS["harmony"], REASONING_DIALECTS["harmony"]))
    message, _ = await message_of(harness, response_format={"type": "json_object"})
    assert (message["reasoning_content"], message["content"]) == ("hm", '{"a": 1}')
    grammar = harness.engine.calls[0].params.output_grammar
    assert grammar is not None
    assert lets_through(grammar, TOKENIZER, text)
    assert not lets_through(grammar, TOKENIZER, '{"a": 1}')


async def test_an_answer_by_another_grammar_has_no_thought() -> None:
    """It fits the grammar from its first token, also where the prompt opened a thought."""
    harness = harness_of("the end")
    message, _ = await message_of(harness, chat_template_kwargs={"enable_thinking": True}, regex="the end")
    assert message["content"] == "the end"


async def test_reasoning_effort_reaches_a_template_that_knows_it() -> None:
    tokenizer = byte_level_tokenizer(chat_template="{{ reasoning_effort }}{{ messages[0].content }}")
    harness = Harness(tokenizer=tokenizer)
    assert (await harness.post(CHAT, {"messages": MESSAGES, "reasoning_effort": "low"})).status_code == 200
    assert tokenizer.decode(harness.engine.calls[0].prompt_token_ids) == "lowhi"


async def test_a_template_for_tools_is_used_with_tools() -> None:
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools[0].function.name }}"},
    ]
    tokenizer = byte_level_tokenizer(chat_template=templates)
    harness = Harness(tokenizer=tokenizer, dialect=HERMES)
    for fields in ({"tools": TOOLS}, {}):
        assert (await harness.post(CHAT, {"messages": MESSAGES, **fields})).status_code == 200
    assert [tokenizer.decode(call.prompt_token_ids) for call in harness.engine.calls] == ["f", "plain"]


@pytest.mark.parametrize("stream", [False, True])
async def test_special_tokens_of_a_dialect_are_seen_by_its_parser_alone(stream: bool) -> None:
    """They are skipped in texts, but a call begins with one in Mistral's dialect."""
    backend = byte_level_backend()
    backend.add_special_tokens(["[TOOL_CALLS]", "[ARGS]"])
    settings = {"bos_token": BOS, "eos_token": "<|end|>", "chat_template": "{{ messages[0].content }}"}
    tokenizer = type(TOKENIZER)(backend, settings)
    harness = Harness(
        saying(tokenizer, f'{BOS}ok[TOOL_CALLS]f[ARGS]{{"a": 1}}'),
        tokenizer=tokenizer,
        dialect=Dialect(TOOL_DIALECTS["mistral"]),
        max_seq_len=1000,
    )
    message, _ = await message_of(harness, tools=TOOLS, stream=stream)
    [call] = message["tool_calls"]
    assert (message["content"], call["function"]["arguments"]) == ("ok", '{"a": 1}')
    assert len(call["id"]) == 9
    plain, _ = await message_of(harness, stream=stream)
    assert plain["content"] == 'okf{"a": 1}'


LOOSE: list[dict[str, Any]] = [
    {"type": "string", "pattern": "^(?!x)[a-z]+$"},
    {"type": "dict"},
    {"$ref": "#/$defs/no"},
    {"$schema": "http://x/y"},
    {"type": "object", "required": None, "properties": None},
]


def tool_with(schema: object, *, strict: bool = False) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a", "c"]}
    return {"type": "function", "function": {"name": "h", "parameters": parameters, "strict": strict}}


@pytest.mark.parametrize("schema", LOOSE, ids=str)
async def test_a_schema_that_cannot_be_kept_refuses_no_request(schema: dict[str, Any]) -> None:
    """Neither where a call is required, nor where another function is strict; that one's schema is kept."""
    harness = harness_of(CALL)
    for choice in ("required", "auto"):
        await message_of(harness, tools=[tool_with(schema), *TOOLS], tool_choice=choice)
        grammar = harness.engine.calls[-1].params.output_grammar
        assert grammar is not None
        assert lets_through(grammar, TOKENIZER, CALL)
        wrong = CALL.replace('"a": 1', '"a": "')
        assert not lets_through(grammar, TOKENIZER, wrong, to_the_end=False)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [(LOOSE[0], "properties.a.pattern"), (LOOSE[1], "properties.a.type"), (LOOSE[2], "properties.a.$ref")],
)
async def test_a_strict_function_is_refused_by_name_and_keyword(schema: object, keyword: str) -> None:
    tools = [*TOOLS, tool_with(schema, strict=True)]
    response = await harness_of(CALL).post(CHAT, {"messages": MESSAGES, "tools": tools})
    assert response.status_code == 400, response.text
    assert f"function `h`: `{keyword}`" in response.json()["error"]["message"]


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder"])
@pytest.mark.parametrize("kind", ["array", ["string", "null"], None], ids=str)
async def test_the_parameters_of_a_strict_function_are_an_object(name: str, kind: object) -> None:
    """A call of it would not be parsed."""
    function = {"name": "h", "parameters": {"type": kind}, "strict": True}
    response = await harness_of(CALL, Dialect(TOOL_DIALECTS[name])).post(
        CHAT, {"messages": MESSAGES, "tools": [{"type": "function", "function": function}]}
    )
    assert response.status_code == 400, response.text
    assert "function `h`: the `type` of its parameters must be" in response.json()["error"]["message"]


async def test_a_strict_function_that_may_have_null_has_its_arguments() -> None:
    """Null would be parsed as no arguments, whatever the schema requires."""
    parameters = {**PARAMETERS, "type": ["object", "null"], "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}]
    harness = harness_of(CALL)
    await message_of(harness, tools=tools, tool_choice="required")
    grammar = harness.engine.calls[-1].params.output_grammar
    assert grammar is not None
    assert lets_through(grammar, TOKENIZER, CALL)
    assert not lets_through(grammar, TOKENIZER, CALL.partition('{"a"')[0] + "null", to_the_end=False)


@pytest.mark.parametrize(
    ("schema", "fitting", "others"),
    [
        ({"type": "array", "enum": [["x" * 500]]}, "[5]", "{}"),
        ({"description": "x" * 500}, "5", ""),
    ],
)
async def test_a_schema_that_costs_too_much_is_reduced(
    schema: dict[str, Any], fitting: str, others: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the types of the arguments."""
    monkeypatch.setitem(MAX_CHARS, GrammarKind.LARK, 800)
    harness = harness_of(CALL)
    await message_of(harness, tools=[tool_with(schema)], tool_choice="required")
    grammar = harness.engine.calls[-1].params.output_grammar
    assert grammar is not None
    text = '<tool_call>\n{"name": "h", "arguments": {"a": '
    assert lets_through(grammar, TOKENIZER, text + fitting, to_the_end=False)
    assert not others or not lets_through(grammar, TOKENIZER, text + others, to_the_end=False)


async def test_texts_of_a_schema_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients describe each argument of many functions."""
    monkeypatch.setitem(MAX_CHARS, GrammarKind.LARK, 600)
    harness = harness_of(CALL)
    argument = {"type": "string", "enum": ["x"], "description": "d" * 600, "title": "t", "default": "x"}
    parameters = {"type": "object", "properties": {"description": argument}, "required": ["description"]}
    function = {"name": "f", "parameters": parameters, "strict": True}
    await message_of(harness, tools=[{"type": "function", "function": function}], tool_choice="required")
    grammar = harness.engine.calls[-1].params.output_grammar
    assert grammar is not None
    call = '<tool_call>\n{"name": "f", "arguments": {"description": "%s"}}\n</tool_call>'
    assert lets_through(grammar, TOKENIZER, call % "x")
    assert not lets_through(grammar, TOKENIZER, call % "y", to_the_end=False)


@pytest.mark.parametrize("rest", [{}, {"type": "object"}])  # the second is no more than names and types
async def test_a_function_of_too_many_arguments_takes_any(
    rest: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MAX_CHARS, GrammarKind.LARK, 700)
    harness = harness_of(CALL)
    properties = {f"argument_{i}": {"type": "null"} for i in range(24)}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties, **rest}}}
    await message_of(harness, tools=[tool], tool_choice="required")
    grammar = harness.engine.calls[-1].params.output_grammar
    assert grammar is not None
    assert lets_through(grammar, TOKENIZER, CALL)


async def test_others_run_between_the_grammars_that_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes up to 0.15 s to be written for a function with 19,000 arguments."""
    log: list[str] = []

    async def refuse(_: GrammarCompiler, source: GrammarSource, param: str, tenant: str) -> Any:
        log.append("tried")
        raise InvalidRequestError("too long", param)

    async def other() -> None:
        for _ in range(5):
            log.append("other")
            await asyncio.sleep(0)

    monkeypatch.setattr(GrammarCompiler, "compile", refuse)
    model: Any = SimpleNamespace(dialect=HERMES, generator=SimpleNamespace(tokenizer=TOKENIZER))
    loose = Function("f", {"properties": {"a": {"type": "integer", "minimum": 1}}})
    use = ToolUse(functions=(loose, Function("g", strict=True)))
    running = asyncio.create_task(other())
    grammar, _ = answer_rules(ChatBody(messages=MESSAGES), use, model)
    assert grammar is not None
    sources = [partial(source, "") for source in grammar.sources]
    with pytest.raises(InvalidRequestError, match="too long"):
        await GrammarCompiler(lambda: "", ()).compile_first(sources, grammar.param)
    assert log[:5] == ["tried", "other", "tried", "other", "tried"]
    await running
