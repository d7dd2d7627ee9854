from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from shortfin_apps.llm.components.grammar import source
from shortfin_apps.llm.components.grammar.compiler import GrammarCompiler
from shortfin_apps.llm.components.grammar.source import GrammarSource
from shortfin_apps.llm.components.request.grammar import Grammar
from shortfin_apps.llm.serving.api import tools
from tests.serving.api.harness import CHAT, COMPLETIONS, MESSAGES, MESSAGES_ROUTE, RESPONSES, Harness
from tests.serving.api.loopback import TIMEOUT_S, ready_server
from tests.serving.api.test_tools import harness_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "null"}}}
ASKING: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
        }
    },
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": "{}", "disable_any_whitespace": True}},
    {"structured_outputs": {"json_object": True}},
    {"structured_outputs": {"regex": "a+"}},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"structured_outputs": {"grammar": 'root ::= "a"'}},
    {"guided_json": SCHEMA},
    {"guided_regex": "a"},
    {"guided_choice": ["a"]},
    {"guided_grammar": 'start: "a"'},
    {"json_schema": "{}"},
    {"regex": "a"},
    {"ebnf": 'root ::= "a"'},
    {"grammar": 'root ::= "a"'},
]
FREE: list[dict[str, Any]] = [
    {"response_format": {"type": "text"}},
    {"regex": ""},
    {"structured_outputs": {}},
]


def grammars_of(harness: Harness) -> list[Grammar | None]:
    return [call.params.output_grammar for call in harness.engine.calls]


@pytest.mark.parametrize("fields", [*ASKING, *FREE], ids=str)
async def test_every_field_reaches_the_engine(harness: Harness, fields: dict[str, Any]) -> None:
    for path, body in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "a"})):
        response = await harness.post(path, {**body, **fields})
        assert response.status_code == 200, response.text
        assert "x-ignored-fields" not in response.headers
    sampling = await harness.post("/generate", {"text": "a", "sampling_params": fields})
    assert sampling.status_code == 200, sampling.text
    assert [grammar is not None for grammar in grammars_of(harness)] == [fields in ASKING] * 3


FUNCTION = {"name": "f", "parameters": {"type": "object"}}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
NAMED = {"type": "function", "function": {"name": "f"}}
JSON_SCHEMA = {"type": "json_schema", "schema": SCHEMA}
WITH_CALLS: list[tuple[str, dict[str, Any], str]] = [
    *((CHAT, {"tools": CHAT_TOOLS, "tool_choice": "required", **fields}, "response_format")
      for fields in ASKING[:3]),
    (CHAT, {"tools": CHAT_TOOLS, "tool_choice": NAMED, **ASKING[0]}, "response_format"),
    (CHAT, {"tools": CHAT_TOOLS, "tool_choice": "required", "structured_outputs": {"json": SCHEMA}},
     "structured_outputs.json"),
    (RESPONSES, {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required",
                 "text": {"format": {"name": "n", **JSON_SCHEMA}}}, "text.format"),
    (MESSAGES_ROUTE, {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "max_tokens": 50,
                      "tool_choice": {"type": "any"}, "output_config": {"format": JSON_SCHEMA}},
     "output_config.format"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "named"), WITH_CALLS, ids=str)
async def test_a_schema_with_a_required_call_is_named_as_ignored(
    path: str, fields: dict[str, Any], named: str
) -> None:
    harness = harness_of('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    body = {"input": "a"} if path == RESPONSES else {"messages": MESSAGES}
    response = await harness.post(path, {**body, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["x-ignored-fields"] == named
    optional = {"type": "auto"} if path == MESSAGES_ROUTE else "auto"
    response = await harness.post(path, {**body, **fields, "tool_choice": optional})
    assert response.status_code == 200, response.text
    assert "x-ignored-fields" not in response.headers


async def test_choices_share_a_grammar(harness: Harness) -> None:
    await harness.post(CHAT, {"messages": MESSAGES, "n": 2, "regex": "a"})
    first, second = grammars_of(harness)
    assert first is second is not None


ROUTES: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": MESSAGES, "guided_regex": "a"}, "guided_regex"),
    (COMPLETIONS, {"prompt": "a", "guided_regex": "a"}, "guided_regex"),
    ("/generate", {"text": "a", "sampling_params": {"regex": "a"}}, "sampling_params.regex"),
]


@pytest.mark.parametrize(("path", "body", "param"), ROUTES, ids=[path for path, *_ in ROUTES])
async def test_a_client_that_leaves_ends_the_trial_of_its_grammar(
    path: str, body: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is a trial of its tenant."""
    asked, began, ended = [], asyncio.Event(), asyncio.Event()

    async def forever(_: GrammarCompiler, source: GrammarSource, param: str, tenant: str) -> Grammar:
        asked.append((param, tenant))
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    monkeypatch.setattr(GrammarCompiler, "compile", forever)
    async with ready_server() as server:
        writer = await server.send_raw(path, json.dumps({**body, "user": "me"}).encode())
        await asyncio.wait_for(began.wait(), TIMEOUT_S)
        writer.close()
        await asyncio.wait_for(ended.wait(), TIMEOUT_S)
    assert asked == [(param, "me")]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": 3}}, "response_format.json_schema"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs.json"),
        ({"guided_json": {"type": "objec"}}, "guided_json"),
    ],
    ids=str,
)  # fmt: skip
async def test_what_is_wrong_is_named(harness: Harness, fields: dict[str, Any], param: str) -> None:
    response = await harness.post(CHAT, {"messages": MESSAGES, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param), response.text
    assert not harness.engine.calls


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": "[" + "[]," * 30_000 + "[]]"},
        {"guided_json": " " * 70_000 + "{}"},
        {"structured_outputs": {"json": "[" + "[]," * 30_000 + "[]]"}},
        {"guided_json": {"enum": ["x" * 70_000]}},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_a_schema_is_bounded_before_it_is_parsed(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = harness_of("x")  # whose model thinks, so that schemas are parsed to put a thought before them
    monkeypatch.setattr(tools, "_schema_of", lambda source: pytest.fail(f"parses {source.text[:20]}"))
    response = await harness.post(CHAT, {"messages": MESSAGES, **fields})
    assert response.status_code == 400
    assert "at most 65,536 characters" in response.text


async def test_a_schema_is_bounded_before_it_is_written(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dumps(value: Any) -> str:
        assert len(str(value)) < 70_000, "writes it"
        return json.dumps(value)

    monkeypatch.setattr(source, "json", SimpleNamespace(dumps=dumps))
    schema = {"enum": [1.5] * 20_000}
    asking: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        {"response_format": {"type": "json_object", "schema": schema}},
        {"structured_outputs": {"json": schema}},
        {"guided_json": schema},
        {"json_schema": schema},
    ]
    for fields in asking:
        response = await harness.post(COMPLETIONS, {"prompt": "a", **fields})
        assert response.status_code == 400
        assert "at most 65,536 characters" in response.text


@pytest.mark.parametrize("choices", [["x"] * 50_000, ["x" * 70_000]], ids=["many", "long"])
async def test_choices_are_bounded_before_they_are_quoted(
    harness: Harness, choices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "choice_source", lambda choices: pytest.fail("quotes them"))
    for fields in ({"guided_choice": choices}, {"structured_outputs": {"choice": choices}}):
        response = await harness.post(COMPLETIONS, {"prompt": "a", **fields})
        assert response.status_code == 400
        assert "at most 65,536 characters" in response.text
