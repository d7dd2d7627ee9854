"""A budget of reasoning tokens cuts a thought at any token; the answer follows as without a budget."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from tokenizers import AddedToken

from shortfin_apps.llm.components.grammar.compiled import CompiledGrammar
from shortfin_apps.llm.components.request.messages import Delta, FinishReason, GenerateCall
from shortfin_apps.llm.serving.api.schema import BUDGET_FIELDS
from shortfin_apps.llm.serving.dialects.choose import REASONING_DIALECTS, TOOL_DIALECTS
from shortfin_apps.llm.serving.dialects.dialect import Dialect
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer
from tests.matrices import slow_rows_but
from tests.serving.api.harness import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    MESSAGES_ROUTE,
    NATIVE,
    RESPONSES,
    Harness,
)
from tests.serving.api.scripted_engine import Script
from tests.serving.api.test_tools import CALL, HERMES, TEMPLATE, TOOLS, message_of
from tests.serving.text.tiny_tokenizers import EOS, byte_level_backend

HARMONY = Dialect(TOOL_DIALECTS["harmony"], REASONING_DIALECTS["harmony"])
FINAL = "<|start|>assistant<|channel|>final<|message|>"
OPEN = {"chat_template_kwargs": {"enable_thinking": True}}
THOUGHT = "a < b, 5 € </thi <tool_call> {"
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
KINDS = ("text", "added", "special")
QUICK = [("text", False), ("added", True), ("special", False)]
MAX_MORE = 3  # tokens that complete a character


def tokenizer_of(kind: str, *, template: str = TEMPLATE, tags: tuple[str, ...] = TAGS) -> Tokenizer:
    """With the tags as text of several tokens, as added tokens, or as special tokens."""
    backend = byte_level_backend()
    if kind != "text":
        backend.add_tokens([AddedToken(tag, special=kind == "special") for tag in tags])
    return Tokenizer(backend, {"eos_token": EOS, "chat_template": template})


def thinking(tokenizer: Tokenizer, begin: str, thought: str, end: str, answer: str) -> Script:
    """A model that thinks, closes its thought and answers; where one token is allowed, it takes that one.

    It checks that its grammar allows what it wants.
    """
    before, after = (tokenizer.encode(text) for text in (begin + thought + end, answer))
    after += sorted(tokenizer.eos_token_ids)[:1]

    def wish(token_ids: list[int]) -> int:
        for place in range(len(token_ids) + 1):
            if end in tokenizer.decode(token_ids[:place], skip_special_tokens=False):
                return after[len(token_ids) - place]
        return before[len(token_ids)]

    def script(call: GenerateCall) -> Iterator[Delta]:
        grammar = call.params.output_grammar
        matcher = None if grammar is None else grammar.matcher()
        token_ids: list[int] = []
        ended = False
        while not ended:
            token_id = wish(token_ids)
            if matcher is not None:
                allowed = int.from_bytes(matcher.allowed(token_ids), "little")
                forced = list(matcher.forced(token_ids))
                if allowed.bit_count() == 1:
                    token_id = allowed.bit_length() - 1
                assert forced[:1] in ([], [token_id])
                assert allowed >> token_id & 1, (tokenizer.decode(token_ids), tokenizer.decode([token_id]))
            token_ids.append(token_id)
            ended = token_id in tokenizer.eos_token_ids
            is_cut = not ended and len(token_ids) == call.params.max_tokens
            reason = FinishReason.STOP if ended else FinishReason.LENGTH if is_cut else None
            ended = ended or is_cut
            yield Delta(request_id=call.request_id, token_ids=(token_id,), finish_reason=reason)

    return script


def harness_of(
    tokenizer: Tokenizer, script: Script, dialect: Dialect = HERMES, max_seq_len: int = 1000
) -> Harness:
    return Harness(script, tokenizer=tokenizer, dialect=dialect, max_seq_len=max_seq_len)


def cut(tokenizer: Tokenizer, thought: str, budget: int, *, shows_tags: bool) -> list[str]:
    """What a budget leaves of a thought: the tokens of the budget, and those that complete a character.

    If the thought ends with a part of `</think>`, the part may have become one of the mark.
    """
    token_ids = tokenizer.encode(thought)
    ends = range(budget, budget + MAX_MORE + 1)
    texts = [tokenizer.decode(token_ids[:end], skip_special_tokens=not shows_tags) for end in ends]
    text = next(text for text in texts if "\ufffd" not in text).strip()
    parts = [text.removesuffix("</think>"[:size]).strip() for size in range(5, 0, -1)]
    return [text, *(part for part in parts if part != text)]


async def chat(harness: Harness, stream: bool, **fields: Any) -> tuple[str, str, Any]:
    message, _ = await message_of(harness, stream=stream, **fields)
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return message.get("reasoning_content", ""), message["content"] or "", calls


@pytest.mark.parametrize(("kind", "stream"), slow_rows_but(QUICK, product(KINDS, [False, True])))
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(
    ("fields", "answer", "content", "num_calls"),
    [
        ({}, "\n\nthe end", "the end", 0),
        ({"tools": TOOLS[1:]}, f"\n{CALL}", "", 1),
        ({"tools": TOOLS, "tool_choice": "required"}, f"\n{CALL}", "", 1),
        ({"tools": TOOLS}, f"\nok {CALL}", "ok", 1),
        ({"response_format": {"type": "json_object"}}, '\n{"a": 1}', '{"a": 1}', 0),
    ],
    ids=["text", "call", "required", "strict", "json"],
)
async def test_a_thought_is_cut_at_every_token(
    fields: dict[str, Any], answer: str, content: str, num_calls: int, kind: str, is_open: bool, stream: bool
) -> None:
    tokenizer = tokenizer_of(kind)
    is_free = not fields or fields == {"tools": TOOLS[1:]}
    # A grammar of text after reasoning allows no special token in it, nor a call that is none in an answer
    # that begins with text as well as with a mark of several tokens.
    has_tag = is_free or (kind == "text" and (is_open or fields != {"tools": TOOLS}))
    thought = THOUGHT if has_tag else THOUGHT.replace("<tool_call>", "<tool")
    begin = "" if is_open else "<think>"
    harness = harness_of(tokenizer, thinking(tokenizer, begin, thought, "</think>", answer))
    num_tokens = len(tokenizer.encode(thought))
    for budget in (*range(num_tokens + 2), 4000):
        asked = {**fields, **(OPEN if is_open else {}), "thinking_token_budget": budget}
        reasoning, text, calls = await chat(harness, stream, **asked)
        assert reasoning in cut(tokenizer, thought, budget, shows_tags="tools" in fields)
        assert (text, len(calls)) == (content, num_calls)


ROUTES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, **OPEN},
    RESPONSES: {"input": "hi", **OPEN},
    MESSAGES_ROUTE: {"messages": MESSAGES, "max_tokens": 500, "thinking": {"type": "enabled"}},
    COMPLETIONS: {"prompt": "hi<think>\n", "max_tokens": 500},
    NATIVE: {"text": "hi<think>\n", "sampling_params": {"max_completion_tokens": 500}},
}


def budgeted(path: str, budget: int) -> dict[str, Any]:
    body = dict(ROUTES[path])
    if path == MESSAGES_ROUTE:
        body["thinking"] = {"type": "enabled", "budget_tokens": budget}
    elif path == NATIVE:
        body["sampling_params"] = body["sampling_params"] | {"thinking_token_budget": budget}
    else:
        body["thinking_token_budget"] = budget
    return body


def texts_of(path: str, answer: Any) -> tuple[str, str]:
    """The reasoning and the content of an answer that is not streamed."""
    match path:
        case "/v1/chat/completions":
            message = answer["choices"][0]["message"]
            return message.get("reasoning_content", ""), message["content"]
        case "/v1/responses":
            texts = {item["type"]: item["content"][0]["text"] for item in answer["output"]}
            return texts.get("reasoning", ""), texts["message"]
        case "/v1/messages":
            texts = {block["type"]: block.get("thinking", block.get("text")) for block in answer["content"]}
            return texts.get("thinking", ""), texts["text"]
        case "/v1/completions":
            text = answer["choices"][0]["text"]
        case _:
            text = answer["responses"][0]["responses"][0]["text"]
    thought, _, content = text.partition("</think>")
    return thought.strip(), content.strip()


@pytest.mark.parametrize("path", ROUTES)
async def test_every_route_has_a_budget(path: str) -> None:
    tokenizer = tokenizer_of("added")
    harness = harness_of(tokenizer, thinking(tokenizer, "", "one and two", "</think>", "\n\nthe end"))
    for budget in (0, 1, 4, -1):
        body = budgeted(path, budget) if budget >= 0 or path != MESSAGES_ROUTE else ROUTES[path]
        response = await harness.post(path, body)
        assert response.status_code == 200, response.text
        assert "x-ignored-fields" not in response.headers
        reasoning, content = texts_of(path, response.json())
        expected = tokenizer.decode(tokenizer.encode("one and two")[: None if budget < 0 else budget])
        assert (reasoning, content) == (expected.strip(), "the end")
        grammar = harness.engine.calls[-1].params.output_grammar
        assert (grammar is None) == (budget == -1)


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES_ROUTE])
async def test_streams_of_other_formats_have_the_same_blocks(path: str) -> None:
    tokenizer = tokenizer_of("special")
    harness = harness_of(tokenizer, thinking(tokenizer, "", "one and two", "</think>", "\n\nthe end"))
    response = await harness.post(path, budgeted(path, 4) | {"stream": True})
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    if path == RESPONSES:
        reasoning, content = texts_of(path, events[-1]["response"])
    else:
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        reasoning, content = ("".join(each.get(name, "") for each in deltas) for name in ("thinking", "text"))
    assert (reasoning, content) == ("one", "the end")


async def test_a_prompt_of_tokens_may_have_begun_a_thought() -> None:
    tokenizer = tokenizer_of("added")
    harness = harness_of(tokenizer, thinking(tokenizer, "", "one and two", "</think>", "ok"))
    body = {"prompt": tokenizer.encode("hi<think>"), "max_tokens": 50, "thinking_token_budget": 3}
    response = await harness.post(COMPLETIONS, body)
    assert response.json()["choices"][0]["text"] == "one</think>ok"
    body["prompt"] = [2**70]
    assert (await harness.post(COMPLETIONS, body)).status_code == 400


@pytest.mark.parametrize("name", BUDGET_FIELDS)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_model_that_does_not_think_is_not_cut(name: str, kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    harness = harness_of(tokenizer, thinking(tokenizer, "", "", "2 < 3 </think", " or not"))
    for budget in (0, 3):
        assert await chat(harness, False, **{name: budget}) == ("", "2 < 3 </think or not", [])


async def test_a_thought_that_the_template_has_closed_has_no_budget() -> None:
    """As Qwen 3's does with `enable_thinking` set to false."""
    tokenizer = tokenizer_of("added", template="{{ messages[0].content }}<think>\n\n</think>\n\n")
    harness = harness_of(tokenizer, thinking(tokenizer, "", "", "the", " end"))
    assert await chat(harness, False, thinking_token_budget=0) == ("", "the end", [])


@pytest.mark.parametrize("fields", [{}, {"thinking_token_budget": 2}, {"thinking_token_budget": 0}], ids=str)
async def test_an_empty_thought_leaves_no_trace(fields: dict[str, Any]) -> None:
    """Qwen 3 writes one where a message has `/no_think`, which its template leaves to the model."""
    tokenizer = tokenizer_of("added")
    harness = harness_of(tokenizer, thinking(tokenizer, "<think>", "\n\n", "</think>", "\n\nthe end"))
    messages = [{"role": "user", "content": "hi /no_think"}]
    for stream in (False, True):
        assert await chat(harness, stream, messages=messages, **fields) == ("", "the end", [])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_the_budget_cuts_is_reasoning(stream: bool) -> None:
    tokenizer = tokenizer_of("added")
    thought = f"hm {CALL} hm"
    harness = harness_of(tokenizer, thinking(tokenizer, "", thought, "</think>", "the end"))
    for budget in range(len(tokenizer.encode(thought)) + 1):
        asked = {"tools": TOOLS[1:], "thinking_token_budget": budget, **OPEN}
        reasoning, content, calls = await chat(harness, stream, **asked)
        assert (content, calls) == ("the end", [])
        assert reasoning == cut(tokenizer, thought, budget, shows_tags=True)[0]


async def test_max_tokens_may_end_the_answer_before_the_budget() -> None:
    tokenizer = tokenizer_of("added")
    harness = harness_of(tokenizer, thinking(tokenizer, "", "one and two", "</think>", "the end"))
    message, reason = await message_of(harness, **OPEN, thinking_token_budget=9, max_tokens=3)
    assert (message["reasoning_content"], message["content"], reason) == ("one", "", "length")
    message, reason = await message_of(harness, **OPEN, thinking_token_budget=3, max_tokens=4)
    assert (message["reasoning_content"], message["content"], reason) == ("one", "", "length")


async def test_the_end_of_the_answer_in_a_thought_is_the_models() -> None:
    tokenizer = tokenizer_of("added")
    harness = harness_of(tokenizer, thinking(tokenizer, "", f"one{EOS}", "</think>", "the end"))
    message, reason = await message_of(harness, **OPEN, thinking_token_budget=9)
    assert (message["reasoning_content"], message["content"], reason) == ("one", "", "stop")


@pytest.mark.parametrize("budget", range(6))
@pytest.mark.parametrize("stream", [False, True])
async def test_a_thought_in_a_channel_is_cut(budget: int, stream: bool) -> None:
    """No other thought follows, as the grammar fixes the messages of the answer."""
    marks = tuple(sorted(HARMONY.marks - {EOS}))
    backend = byte_level_backend()
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in (*marks, "<|return|>")])
    tokenizer = Tokenizer(backend, {"eos_token": "<|return|>", "chat_template": TEMPLATE})
    begin = "<|channel|>analysis<|message|>"
    script = thinking(tokenizer, begin, "hm hm", "<|end|>", f"{FINAL}the end")
    harness = harness_of(tokenizer, script, HARMONY)
    for fields in ({}, {"tools": TOOLS[1:]}):
        reasoning, content, _ = await chat(harness, stream, thinking_token_budget=budget, **fields)
        assert (reasoning, content) == ("hm hm"[:budget].strip(), "the end")
    response = await harness.post(COMPLETIONS, {"prompt": "a", "thinking_token_budget": 1})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "thinking_token_budget")


async def test_a_thought_of_two_sentences_is_cut() -> None:
    tokenizer = tokenizer_of("text")
    begin, end = "Here is my thought process:", "Here is my response:"
    dialect = Dialect(None, REASONING_DIALECTS["granite"])
    harness = harness_of(tokenizer, thinking(tokenizer, begin, " one Here is", end, "\nthe end"), dialect)
    for budget, thought in ((0, ""), (2, "o"), (4, "one"), (99, "one Here is")):
        reasoning, content, _ = await chat(harness, False, thinking_token_budget=budget)
        assert (reasoning, content) == (thought, "the end")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"reasoning_budget": 2**31}, "reasoning_budget"),
        ({"reasoning_budget": 1, "thinking_token_budget": 2}, "reasoning_budget"),
        ({"thinking_token_budget": "5"}, "thinking_token_budget"),
        ({"thinking_token_budget": True}, "thinking_token_budget"),
        ({"thinking_token_budget": 5, "min_tokens": 2}, "min_tokens"),
        ({"thinking_token_budget": 5, "receipt": True}, "receipt"),
    ],
)
async def test_budgets_that_cannot_be_kept_are_refused(fields: dict[str, Any], param: str) -> None:
    tokenizer = tokenizer_of("text")
    harness = harness_of(tokenizer, thinking(tokenizer, "", "", "the", " end"))
    response = await harness.post(CHAT, {"messages": MESSAGES, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert not harness.engine.calls


@pytest.mark.parametrize("path", ROUTES)
async def test_a_model_without_a_known_form_of_reasoning_refuses_a_budget(path: str) -> None:
    tokenizer = tokenizer_of("text")
    harness = harness_of(tokenizer, thinking(tokenizer, "", "", "the", " end"), Dialect())
    response = await harness.post(path, budgeted(path, 5))
    assert response.status_code == 400
    name = {MESSAGES_ROUTE: "thinking.budget_tokens", NATIVE: "sampling_params.thinking_token_budget"}
    assert f"`{name.get(path, 'thinking_token_budget')}`" in response.text
    assert "--reasoning-parser" in response.text


async def test_two_budgets_of_one_message_are_refused() -> None:
    tokenizer = tokenizer_of("text")
    harness = harness_of(tokenizer, thinking(tokenizer, "", "", "the", " end"))
    body = budgeted(MESSAGES_ROUTE, 5) | {"thinking_token_budget": 5}
    assert (await harness.post(MESSAGES_ROUTE, body)).status_code == 400


async def test_a_grammar_without_reasoning_has_no_budget() -> None:
    tokenizer = tokenizer_of("text")
    harness = harness_of(tokenizer, thinking(tokenizer, "", "", "the", " end"))
    for fields in ({}, OPEN):
        answer = await chat(harness, False, regex="the end", thinking_token_budget=0, **fields)
        assert answer == ("", "the end", [])
    grammar = harness.engine.calls[-1].params.output_grammar
    assert isinstance(grammar, CompiledGrammar)
    assert grammar.source.budget is None
