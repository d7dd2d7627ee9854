"""Whatever a request's grammar, a model with random weights writes what fits it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.engine import mask_costs
from shortfin_apps.llm.components.grammar import compiler
from shortfin_apps.llm.components.grammar.compiler import GrammarCompiler
from tests.components.grammar.hostile import NEVER_COMPILED, UNLIMITED
from tests.integration.json_schemas import SCHEMAS
from tests.integration.served_tiny import MODEL, serving

pytestmark = pytest.mark.slow

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "A record, please."}]
TEMPERATURES = (0.0, 0.7, 1.5)
MAX_TOKENS = 300


async def finished(client: httpx.AsyncClient, body: Mapping[str, Any]) -> tuple[str, str]:
    """The content of an answer and its finish reason, whole or joined from its events."""
    response = await client.post(CHAT, json={"messages": MESSAGES, "max_tokens": MAX_TOKENS, **body})
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        [choice] = response.json()["choices"]
        return choice["message"]["content"], choice["finish_reason"]
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(c["delta"].get("content") or "" for c in choices), choices[-1]["finish_reason"]


async def check_schema(client: httpx.AsyncClient, index: int, schema: dict[str, Any]) -> bool:
    """Asserts that an answer that is not cut fits its schema; whether it was not."""
    format_of = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    compact = {"json": schema, "disable_any_whitespace": True}
    asked = {"response_format": format_of} if index % 10 == 0 else {"structured_outputs": compact}
    body = {**asked, "temperature": TEMPERATURES[index % 3], "seed": index, "stream": index % 2 == 0}
    content, reason = await finished(client, body)
    if reason != "stop":
        assert reason == "length"
        return False
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.validate(json.loads(content), schema, format_checker=checker)
    return True


@pytest.mark.parametrize("mode", ["default", "extend-attention"])
async def test_values_fit_their_schemas(tiny_artifact: Artifact, mode: str) -> None:
    """With so few pages that requests are preempted."""
    async with serving(tiny_artifact, batch_mode=mode, pages=40, max_queue=400) as (client, service):
        checks = [check_schema(client, index, schema) for index, schema in enumerate(SCHEMAS)]
        whole = await asyncio.gather(*checks)
        assert service.model.generator.engine.stats().preemptions > 0
    assert len(whole) == 200
    assert sum(whole) >= 190


SCALARS = st.sampled_from([
    {"type": "boolean"}, {"type": "null"}, {"type": "integer", "minimum": -5, "maximum": 70},
    {"type": "string", "maxLength": 3}, {"enum": ["a", 1, None]}, {"const": 'q"\\ü'},
])  # fmt: skip


def _nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    arrays = st.builds(
        lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
        *(inner, st.integers(0, 2), st.integers(0, 1)),
    )
    objects = st.builds(
        lambda properties, optional: {
            "type": "object",
            "properties": properties,
            "required": list(properties)[optional:],
            "additionalProperties": False,
        },
        *(st.dictionaries(st.text("ab_ ü", min_size=1, max_size=3), inner, max_size=3), st.integers(0, 3)),
    )
    return arrays | objects | st.builds(lambda *options: {"anyOf": list(options)}, inner, inner)


async def test_values_fit_random_schemas(tiny_artifact: Artifact) -> None:
    async with serving(tiny_artifact) as (client, _):
        drawn: list[dict[str, Any]] = []

        @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(schema=st.recursive(SCALARS, _nested, max_leaves=6))
        def collect(schema: dict[str, Any]) -> None:
            drawn.append(schema)

        collect()
        await asyncio.gather(
            *(check_schema(client, 10 * i + 1 + i % 6, schema) for i, schema in enumerate(drawn))
        )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_slows_down_others_is_an_error_of_its_field(
    tiny_artifact: Artifact, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(mask_costs, "MAX_EXCESS_S", 0.0)
    body = {
        "messages": MESSAGES,
        "n": 4,
        "guided_grammar": 'start: a\na: a a | /[a-z ]/ | ""',
        "stream": stream,
    }
    async with serving(tiny_artifact) as (client, _):
        response = await client.post(CHAT, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "guided_grammar")
        answer = await client.post(CHAT, json={"messages": MESSAGES, "max_tokens": 9})
        assert answer.status_code == 200


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}, "[a-c]{3}-[0-9]{2}"),
    ({"guided_regex": "x{2,4}y"}, "x{2,4}y"),
    ({"regex": "(yes|no)[.!]"}, "(yes|no)[.!]"),
    (
        {"structured_outputs": {"choice": ['a"b', "back\\slash", "two\nlines", "ü"]}},
        r'a"b|back\\slash|two\nlines|ü',
    ),
    ({"guided_choice": ["left", "right"]}, "left|right"),
    ({"grammar": 'root ::= "<" [a-z]{1,5} ">"'}, "<[a-z]{1,5}>"),
    ({"ebnf": 'root ::= item "," item\nitem ::= "a" | "b"'}, "[ab],[ab]"),
    ({"guided_grammar": 'start: "n=" /[0-9]{1,3}/'}, "n=[0-9]{1,3}"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_texts_match_their_grammars(tiny_artifact: Artifact, stream: bool) -> None:
    async with serving(tiny_artifact) as (client, _):
        bodies = [{**form, "temperature": 1.5, "seed": 3, "stream": stream} for form, _ in FORMS]
        answers = await asyncio.gather(*(finished(client, body) for body in bodies))
    for (content, reason), (_, pattern) in zip(answers, FORMS, strict=True):
        assert re.fullmatch(pattern, content), content
        assert reason == "stop"


async def test_other_parameters_go_with_a_grammar(tiny_artifact: Artifact) -> None:
    """Log-probabilities, filters, several choices, a stop string, a cut."""
    async with serving(tiny_artifact) as (client, _):
        body = {
            "messages": MESSAGES,
            "regex": "[a-d]{6}",
            "max_tokens": 20,
            "logprobs": True,
            "n": 3,
            "seed": 1,
        }
        filtered = {**body, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "temperature": 1.2}
        choices = (await client.post(CHAT, json=filtered)).json()["choices"]
        cut = await finished(client, {"regex": "[a-d]{6}", "max_tokens": 3})
        stopped = await finished(client, {"regex": "aaXbb", "stop": "X"})
    assert all(re.fullmatch("[a-d]{6}", choice["message"]["content"]) for choice in choices)
    assert len({choice["message"]["content"] for choice in choices}) > 1, "each has a seed of its own"
    assert all(len(choice["logprobs"]["content"]) >= 6 for choice in choices)
    assert re.fullmatch("[a-d]{3}", cut[0])
    assert (cut[1], stopped) == ("length", ("aa", "stop"))


async def test_a_grammar_changes_no_other_request(tiny_artifact: Artifact) -> None:
    plain = {"temperature": 0.9, "seed": 5, "max_tokens": 40}
    async with serving(tiny_artifact) as (client, _):
        alone = await finished(client, plain)
        beside, _ = await asyncio.gather(
            finished(client, plain), finished(client, {"regex": "[a-z]{30}", "temperature": 1.0})
        )
    assert beside == alone


async def test_sglangs_fields(tiny_artifact: Artifact) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    sampling = [{"regex": "[xy]{4}"}, {"json_schema": json.dumps(schema)}, {"ebnf": 'root ::= "k" | "l"'}]
    async with serving(tiny_artifact) as (client, _):
        body = {"text": ["a"] * 3, "sampling_params": [{**s, "max_new_tokens": 200} for s in sampling]}
        response = (await client.post("/generate", json=body)).json()
    regex, value, letter = [prompt["responses"][0]["text"] for prompt in response["responses"]]
    assert re.fullmatch("[xy]{4}", regex)
    assert json.loads(value)["a"] in (1, 2)
    assert letter in ("k", "l")


class Record(BaseModel):
    count: int = Field(ge=0, le=99)
    color: str = Field(max_length=5)


async def test_openais_client_parses_an_answer(tiny_artifact: Artifact) -> None:
    async with serving(tiny_artifact) as (client, _):
        http_client: Any = client  # it accepts both versions of httpx, its annotation one
        openai_client = openai.AsyncOpenAI(api_key="-", base_url="http://test/v1", http_client=http_client)
        completion = await openai_client.chat.completions.parse(
            model=MODEL, messages=MESSAGES, response_format=Record, max_tokens=MAX_TOKENS, seed=1
        )
    assert isinstance(completion.choices[0].message.parsed, Record)


async def test_answers_come_while_a_grammar_never_compiles(
    tiny_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one whose grammar is compiled meanwhile."""
    monkeypatch.setattr(compiler, "TIMEOUT_S", 1e3)
    async with serving(tiny_artifact) as (client, service):
        generator = service.model.generator
        tokenizer = generator.tokenizer
        generator.grammars = GrammarCompiler(tokenizer.to_json, tokenizer.eos_token_ids, UNLIMITED)
        hostile = {"messages": MESSAGES, "json_schema": NEVER_COMPILED.text}
        slow = asyncio.create_task(client.post(CHAT, json=hostile))
        free = finished(client, {"stream": True})
        bound = finished(client, {"regex": "[ab]{9}"})
        _, (text, _) = await asyncio.gather(free, bound)
        assert not slow.done()
        slow.cancel()
    assert re.fullmatch("[ab]{9}", text)


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"regex": "(" * 16_000}, "regex"),
    ({"regex": "a{100000}"}, "regex"),
    ({"ebnf": "root ::= " + "(" * 9_000 + '"a"' + ")" * 9_000}, "ebnf"),
    ({"grammar": "start: R0\n" + "\n".join(f'R{i}: R{i + 1} "x"' for i in range(1_900))}, "grammar"),
    ({"json_schema": json.dumps({"not": {"type": "null"}})}, "json_schema"),
    ({"json_schema": '{"type":' * 9_000}, "json_schema"),
    (
        {"json_schema": json.dumps({"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"})},
        "json_schema",
    ),
    ({"guided_json": {"oneOf": [{"const": i} for i in range(10_000)]}}, "guided_json"),
    ({"guided_json": {"type": "object", "properties": {f"k{i}": {} for i in range(1_000)}}}, "guided_json"),
    ({"json_schema": NEVER_COMPILED.text}, "json_schema"),
    ({"guided_choice": []}, "guided_choice"),
    ({"regex": "a", "guided_choice": ["b"]}, "regex"),
    ({"regex": "a", "min_tokens": 2}, "min_tokens"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": ["json_object"]}}, "response_format.type"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
]


async def test_hostile_grammars_are_refused_while_others_stream(tiny_artifact: Artifact) -> None:
    async with serving(tiny_artifact) as (client, _):
        body = {"messages": MESSAGES, "max_tokens": 8}
        stream = asyncio.ensure_future(finished(client, {"max_tokens": 100, "stream": True}))
        posts = [client.post(CHAT, json={**body, **hostile}) for hostile, _ in HOSTILE]
        responses = await asyncio.gather(*posts)
        _, reason = await stream
    assert reason in ("stop", "length")
    for response, (_, field) in zip(responses, HOSTILE, strict=True):
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == field, response.text
