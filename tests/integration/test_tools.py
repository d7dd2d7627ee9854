"""Whatever a request's tools, a model with random weights calls them as `tool_choice` says."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.serving.dialects.choose import TOOL_DIALECTS
from tests.integration.served_tiny import MODEL, serving

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "The weather, please."}]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "units": {"enum": ["C", "F"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Tells it.", "parameters": WEATHER},
    },
    {"type": "function", "function": {"name": "now", "strict": True}},
]
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": WEATHER,
    "now": {"type": "object", "maxProperties": 0},
}
DIALECTS = sorted(TOOL_DIALECTS)


def body_of(**fields: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 900, "temperature": 0.9, **fields}


async def choice_of(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[list[tuple[str, str]], str]:
    """The calls of an answer, names with arguments, and its finish reason; joined if it is streamed."""
    response = await client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        [choice] = response.json()["choices"]
        functions = [call["function"] for call in choice["message"].get("tool_calls", ())]
        return [(function["name"], function["arguments"]) for function in functions], choice["finish_reason"]
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    calls: dict[int, list[str]] = {}
    for delta in (call for choice in choices for call in choice["delta"].get("tool_calls", ())):
        if "id" in delta:
            assert delta["index"] == len(calls)
            calls[delta["index"]] = [delta["function"]["name"], ""]
        calls[delta["index"]][1] += delta["function"]["arguments"]
    return [(name, arguments) for name, arguments in calls.values()], choices[-1]["finish_reason"]


def check_calls(calls: list[tuple[str, str]]) -> None:
    assert calls
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("mode", ["default", "extend-attention"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_function_is_called_if_one_must_be(tiny_artifact: Artifact, dialect: str, mode: str) -> None:
    async with serving(tiny_artifact, tool_parser=dialect, batch_mode=mode) as (client, _):
        bodies = [
            body_of(tool_choice="required", parallel_tool_calls=False, seed=seed, stream=bool(seed % 2))
            for seed in range(8)
        ]
        answers = await asyncio.gather(*(choice_of(client, body) for body in bodies))
    whole = [calls for calls, reason in answers if reason == "tool_calls"]
    assert len(whole) >= 6
    for calls in whole:
        assert len(calls) == 1
        check_calls(calls)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_named_function_is_called(tiny_artifact: Artifact, dialect: str) -> None:
    choice = {"type": "function", "function": {"name": "now"}}
    allowed = {"mode": "required", "tools": [choice]}
    async with serving(tiny_artifact, tool_parser=dialect) as (client, _):
        named = await choice_of(client, body_of(tool_choice=choice, stream=True))
        only = await choice_of(
            client,
            body_of(
                tool_choice={"type": "allowed_tools", "allowed_tools": allowed}, parallel_tool_calls=False
            ),
        )
    for [(name, arguments)], reason in (named, only):
        assert (name, json.loads(arguments), reason) == ("now", {}, "tool_calls")


async def test_streamed_calls_are_those_of_the_whole(tiny_artifact: Artifact) -> None:
    async with serving(tiny_artifact, tool_parser="hermes") as (client, _):
        for seed in range(4):
            body = body_of(tool_choice="required", seed=seed)
            whole, streamed = await asyncio.gather(
                choice_of(client, body), choice_of(client, {**body, "stream": True})
            )
            assert whole == streamed
            if whole[1] == "tool_calls":
                check_calls(whole[0])


class City(BaseModel):
    name: str = Field(max_length=8)
    population: int = Field(ge=0, le=999)


def client_of(client: httpx.AsyncClient) -> openai.AsyncOpenAI:
    http_client: Any = client  # it accepts both versions of httpx, its annotation one
    return openai.AsyncOpenAI(api_key="-", base_url="http://test/v1", http_client=http_client)


async def test_openais_loop_of_tools(tiny_artifact: Artifact) -> None:
    """As its guide has it: call, run the function, send the result, until the model answers."""
    async with serving(tiny_artifact, tool_parser="hermes") as (http, _):
        client = client_of(http)
        messages = list(MESSAGES)
        for choice in ("required", "none"):
            answer = await client.chat.completions.create(
                model=MODEL, messages=messages, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False,
                max_tokens=900, seed=2,
            )  # fmt: skip
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                assert call.type == "function"
                check_calls([(call.function.name, call.function.arguments)])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
    assert "tool_calls" not in messages[-1]


async def test_openais_parse(tiny_artifact: Artifact) -> None:
    """Of a model as the format of the answer, and as the arguments of a tool; whole and streamed."""
    async with serving(tiny_artifact, tool_parser="llama3") as (http, _):
        client = client_of(http)
        parsed = await client.chat.completions.parse(
            model=MODEL, messages=MESSAGES, response_format=City, temperature=0.8, seed=1
        )
        tool = openai.pydantic_function_tool(City)
        called = await client.chat.completions.parse(
            model=MODEL, messages=MESSAGES, tools=[tool], tool_choice="required", parallel_tool_calls=False,
            temperature=0.8, seed=1,
        )  # fmt: skip
        async with client.chat.completions.stream(
            model=MODEL, messages=MESSAGES, tools=[tool], tool_choice="required", parallel_tool_calls=False,
            temperature=0.8, seed=1,
        ) as stream:  # fmt: skip
            streamed = await stream.get_final_completion()
    assert isinstance(parsed.choices[0].message.parsed, City)
    for answer in (called, streamed):
        (call,) = answer.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, City)
    assert streamed.choices[0].finish_reason == "tool_calls"
