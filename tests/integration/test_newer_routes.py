"""`/v1/responses` and `/v1/messages` over a compiled model, by their own clients, beside the chat."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.serving.api.app import create_app
from tests.integration.served_tiny import MODEL, serving
from tests.integration.server_process import PATIENCE_S, start, stop
from tests.integration.test_tools import MESSAGES, WEATHER
from tests.serving.api.harness import CHAT, MESSAGES_ROUTE, RESPONSES
from tests.serving.api.official_clients import anthropic_client, openai_client

pytestmark = pytest.mark.slow

LENGTH = 900


async def test_openais_loop_of_tools_by_stored_responses(tiny_artifact: Artifact) -> None:
    """The model must call; the result follows the stored response, whole and streamed."""
    tool: Any = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}
    async with serving(tiny_artifact, tool_parser="hermes") as (_, service):
        client = openai_client(create_app(service))
        shared: dict[str, Any] = {"model": MODEL, "tools": [tool], "parallel_tool_calls": False}
        for seed in range(3):
            first = await client.responses.create(
                **shared, input=MESSAGES, tool_choice="required", extra_body={"seed": seed}
            )
            call = first.output[-1]
            assert call.type == "function_call"
            jsonschema.validate(json.loads(call.arguments), WEATHER)
            result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
            async with client.responses.stream(
                **shared,
                input=[result],
                tool_choice="none",
                previous_response_id=first.id,
                max_output_tokens=20,
            ) as stream:
                kinds = [event.type async for event in stream]
            assert kinds[0] == "response.created"
            assert kinds[-1] in ("response.completed", "response.incomplete")


async def test_anthropics_loop_of_tools(tiny_artifact: Artifact) -> None:
    tool: Any = {"name": "get_weather", "input_schema": WEATHER}
    async with serving(tiny_artifact, tool_parser="hermes") as (_, service):
        client = anthropic_client(create_app(service))
        shared: dict[str, Any] = {"model": MODEL, "tools": [tool], "max_tokens": LENGTH}
        alone: Any = {"type": "any", "disable_parallel_tool_use": True}
        first = await client.messages.create(**shared, messages=MESSAGES, tool_choice=alone)
        call = first.content[-1]
        assert (call.type, first.stop_reason) == ("tool_use", "tool_use")
        jsonschema.validate(call.type == "tool_use" and call.input, WEATHER)
        messages = [
            *MESSAGES,
            {"role": "assistant", "content": [block.to_dict() for block in first.content]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}],
            },
        ]
        named: Any = {"type": "tool", "name": "get_weather"}
        async with client.messages.stream(**shared, messages=messages, tool_choice=named) as stream:
            second = await stream.get_final_message()
        block = second.content[-1]
        jsonschema.validate(block.type == "tool_use" and block.input, WEATHER)


@pytest.fixture(scope="module")
def url(tiny_artifact: Artifact) -> Any:
    service = start(tiny_artifact, "--tool-parser", "hermes", "--max-queue", "64")
    yield service.url
    assert stop(service) == 0


TURNS = st.lists(st.text(st.sampled_from("ab é€\n"), min_size=1, max_size=6), min_size=1, max_size=5).filter(
    lambda texts: len(texts) % 2 == 1
)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(texts=TURNS, system=st.none() | st.just("Be kind."), stream=st.booleans(), seed=st.integers(0, 99))
def test_three_routes_give_one_answer(
    url: str, texts: list[str], system: str | None, stream: bool, seed: int
) -> None:
    """The same conversation has the same text and the same number of tokens on each."""
    turns = [
        {"role": "assistant" if place % 2 else "user", "content": text} for place, text in enumerate(texts)
    ]
    told = [] if system is None else [{"role": "system", "content": system}]
    shared = {"seed": seed, "temperature": 0.7, "stream": stream}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    chat = {"messages": told + turns, "max_tokens": 12, **shared, **options}
    response = {"input": turns, "max_output_tokens": 12, **shared}
    messages = {"messages": turns, "max_tokens": 12, **shared}
    if system is not None:
        response["instructions"] = messages["system"] = system
    answers = [
        read(httpx.post(url + path, json=body, timeout=PATIENCE_S))
        for path, read, body in (
            (CHAT, chat_answer, chat),
            (RESPONSES, response_answer, response),
            (MESSAGES_ROUTE, message_answer, messages),
        )
    ]
    assert answers[1:] == answers[:1] * 2


def events_in(answer: httpx.Response) -> list[Any]:
    """The payloads of a stream; of a whole answer, that alone."""
    assert answer.status_code == 200, answer.text
    if "json" in answer.headers["content-type"]:
        return [answer.json()]
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


Summary = tuple[str, int, int, str]  # the text, tokens of prompt and output, and why it ended


def chat_answer(answer: httpx.Response) -> Summary:
    events = events_in(answer)
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(c.get("delta", c.get("message")).get("content") or "" for c in choices)
    usage = events[-1]["usage"]
    reason = choices[-1]["finish_reason"]
    return text, usage["prompt_tokens"], usage["completion_tokens"], reason


def response_answer(answer: httpx.Response) -> Summary:
    events = events_in(answer)
    response = events[-1].get("response", events[-1])
    text = "".join(part["text"] for item in response["output"] for part in item["content"])
    usage = response["usage"]
    reason = {"completed": "stop", "incomplete": "length"}[response["status"]]
    return text, usage["input_tokens"], usage["output_tokens"], reason


def message_answer(answer: httpx.Response) -> Summary:
    events = events_in(answer)
    if len(events) == 1:
        text, usage = "".join(block["text"] for block in events[0]["content"]), events[0]["usage"]
        reason = events[0]["stop_reason"]
    else:
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        (end,) = (event for event in events if event["type"] == "message_delta")
        text, usage = "".join(delta["text"] for delta in deltas), end["usage"]
        reason = end["delta"]["stop_reason"]
    prompt_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
    known = {"end_turn": "stop", "max_tokens": "length"}
    return text, prompt_tokens, usage["output_tokens"], known[reason]
