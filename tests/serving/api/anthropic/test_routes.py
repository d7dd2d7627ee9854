"""`/v1/messages`, by Anthropic's own client."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import anthropic
import pytest

from shortfin_apps.llm.contract.errors import DeadlineExceededError, InvocationError
from shortfin_apps.llm.serving.api.anthropic import routes
from shortfin_apps.llm.serving.api.json_body import HEADER
from shortfin_apps.llm.serving.http.auth import KeyRing
from tests.serving.api.harness import MAX_SEQ_LEN, MESSAGES, MESSAGES_ROUTE, MODEL, TOKENIZER, Harness
from tests.serving.api.official_clients import anthropic_client
from tests.serving.api.scripted_engine import Script, aborting, failing, forever, saying
from tests.serving.api.test_tools import CALL, PARAMETERS, harness_of, prompt_of
from tests.serving.api.test_tools import TOKENIZER as TEMPLATED

TOOLS: list[Any] = [
    {"name": "f", "description": "d", "input_schema": PARAMETERS},
    {"name": "g", "input_schema": {}},
]


async def message_of(harness: Harness, *, stream: bool, **fields: Any) -> anthropic.types.Message:
    """An answer, of which the client joins the events if it is streamed."""
    client = anthropic_client(harness.app)
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "messages": MESSAGES, **fields}
    if not stream:
        message: anthropic.types.Message = await client.messages.create(**body)
        return message
    async with client.messages.stream(**body) as events:
        return await events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_text(stream: bool) -> None:
    harness = Harness()
    message = await message_of(harness, stream=stream, max_tokens=50)
    assert (message.role, message.model, message.stop_reason) == ("assistant", MODEL, "end_turn")
    assert "".join(block.text for block in message.content if block.type == "text") == "the end"
    usage = message.usage
    (call,) = harness.engine.calls
    assert usage.cache_read_input_tokens == 3
    assert usage.input_tokens + usage.cache_read_input_tokens == len(call.prompt_token_ids)
    assert usage.output_tokens == len(TOKENIZER.encode("the end")) + 1


@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_texts_and_calls_are_blocks(stream: bool) -> None:
    harness = harness_of(f"<think>hm</think>Sure.\n{CALL}\n{CALL}")
    message = await message_of(harness, stream=stream, tools=TOOLS)
    thought, text, first, second = message.content
    assert (thought.type, thought.type == "thinking" and thought.thinking) == ("thinking", "hm")
    assert text.type == "text"
    assert text.text == "Sure."
    for block in (first, second):
        assert block.type == "tool_use"
        assert (block.name, block.input) == ("f", {"a": 1})
    assert message.stop_reason == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_loop_of_tools(stream: bool) -> None:
    """Call, result, and the next turn, in which the model reads both."""
    harness = harness_of(f"<think>hm</think>Sure.\n{CALL}")
    first = await message_of(harness, stream=stream, tools=TOOLS)
    call = first.content[-1]
    assert call.type == "tool_use"
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]},
        {"type": "text", "text": "And?"},
    ]
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": [block.to_dict() for block in first.content]},
        {"role": "user", "content": results},
    ]
    harness.engine.script = saying(TEMPLATED, "It is sunny.")
    last = await message_of(harness, stream=stream, tools=TOOLS, messages=messages)
    assert (last.stop_reason, last.content[-1].type) == ("end_turn", "text")
    answered = '[assistant]Sure.hm{"name": "f", "arguments": {"a": 1}}[tool]sunny[user]And?[assistant]'
    assert prompt_of(harness).endswith(f"[user]hi{answered}")


async def test_a_stream_has_anthropics_events() -> None:
    harness = harness_of(f"<think>hm</think>ok{CALL}")
    body = {"messages": MESSAGES, "max_tokens": 400, "tools": TOOLS, "stream": True}
    text = (await harness.post(MESSAGES_ROUTE, body)).text
    names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    distinct = [name for place, name in enumerate(names) if place == 0 or names[place - 1] != name]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert distinct == ["message_start", "ping", *block * 3, "message_delta", "message_stop"]
    assert "[DONE]" not in text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"stop_sequences": ["end"]}, "stop_sequence", "end"),
        ({"max_tokens": 2}, "max_tokens", None),
        ({}, "end_turn", None),
    ],
)
async def test_stop_reasons(stream: bool, fields: dict[str, Any], reason: str, sequence: str | None) -> None:
    message = await message_of(Harness(), stream=stream, **{"max_tokens": 50, **fields})
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"model": "other"}, anthropic.NotFoundError),
        ({"messages": []}, anthropic.BadRequestError),
        ({"max_tokens": 0}, anthropic.BadRequestError),
        ({"messages": [{"role": "user", "content": "the " * 500}]}, anthropic.BadRequestError),
    ],
)
async def test_refusals_are_the_clients_exceptions(
    error: dict[str, Any], kind: type[anthropic.APIStatusError]
) -> None:
    with pytest.raises(kind) as raised:
        await message_of(Harness(), stream=False, **error)
    body: Any = raised.value.body
    assert (body["type"], sorted(body["error"])) == ("error", ["message", "type"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_is_an_exception(stream: bool) -> None:
    with pytest.raises(anthropic.InternalServerError):
        await message_of(Harness(failing(InvocationError("x"))), stream=stream, max_tokens=9)


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (failing(InvocationError("broken"), after=[5, 6]), "api_error"),
        (aborting(DeadlineExceededError("too late"), after=[5, 6]), "timeout_error"),
    ],
)
async def test_a_failure_within_a_stream_is_an_error_event(script: Script, kind: str) -> None:
    body = {"messages": MESSAGES, "max_tokens": 9, "stream": True}
    text = (await Harness(script).post(MESSAGES_ROUTE, body)).text
    assert text.rstrip().rpartition("event: ")[2].startswith('error\ndata: {"type":"error","error":{"type":')
    assert f'"{kind}"' in text
    with pytest.raises(anthropic.APIError):
        await message_of(Harness(script), stream=True, max_tokens=9)


async def test_an_overloaded_server_is_a_rate_limit() -> None:
    harness = Harness()
    harness.engine.capacity = 0
    with pytest.raises(anthropic.RateLimitError):
        await message_of(harness, stream=False, max_tokens=9)


async def test_a_key_is_accepted_as_anthropics_client_sends_it() -> None:
    harness = Harness(keys=KeyRing(["secret"]))
    body: Any = {"model": MODEL, "max_tokens": 9, "messages": MESSAGES}
    assert await anthropic_client(harness.app, "secret").messages.create(**body)
    with pytest.raises(anthropic.AuthenticationError):
        await anthropic_client(harness.app, "wrong").messages.create(**body)


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image", "source": {"type": "url", "url": "http://x"}}],
        [{"type": "text", "text": "a"}, {"type": "document", "source": {}}],
    ],
)
async def test_images_and_documents_are_refused(content: list[Any]) -> None:
    with pytest.raises(
        anthropic.BadRequestError, match="images, documents and other blocks are not supported"
    ):
        await message_of(Harness(), stream=False, messages=[{"role": "user", "content": content}])


async def test_tokens_are_counted_without_generating_any() -> None:
    harness = harness_of("ok")
    body: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "system": "Be kind.", "tools": TOOLS}
    counted = await anthropic_client(harness.app).messages.count_tokens(**body)
    assert not harness.engine.calls
    message = await message_of(harness, stream=False, **body)
    assert message.usage.input_tokens == counted.input_tokens


async def test_a_schema_is_kept_by_the_clients_parse() -> None:
    harness = harness_of('{"a": 1}')
    form = {"format": {"type": "json_schema", "schema": PARAMETERS}}
    await message_of(harness, stream=False, output_config=form)
    assert harness.engine.calls[0].params.output_grammar is not None
    broken = {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config.format.schema"):
        await message_of(harness, stream=False, output_config=broken)


async def test_an_answer_is_aborted_by_its_id() -> None:
    harness = Harness()
    harness.engine.gate.clear()
    body = {"messages": MESSAGES, "max_tokens": 9}
    answer = harness.client.post(MESSAGES_ROUTE, json=body, headers={"X-Request-Id": "mine"})
    task = asyncio.create_task(answer)
    await harness.engine.waiting.wait()
    assert (await harness.post("/abort", {"rid": "msg_mine"})).json() == {"aborted": 1}
    harness.engine.gate.set()
    response = await task
    assert (response.status_code, response.json()["type"]) == (499, "error")


async def test_ignored_fields_are_reported() -> None:
    content = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    harness = harness_of("ok")
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 50, "thinking": thinking}
    response = await harness.post(MESSAGES_ROUTE, body)
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == "messages.content.cache_control"


async def test_browsers_may_send_what_the_client_does() -> None:
    harness = Harness(cors_origins=["http://page"])
    asked = {
        "Origin": "http://page",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "x-api-key,anthropic-version",
    }
    assert (await harness.client.options(MESSAGES_ROUTE, headers=asked)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_more_tokens_than_the_context_has_room_for_are_cut(stream: bool) -> None:
    """Anthropic's clients have to send a number, and send a large one."""
    harness = Harness(forever(TOKENIZER, "the "))
    message = await message_of(harness, stream=stream, max_tokens=8192)
    assert message.stop_reason == "model_context_window_exceeded"
    (call,) = harness.engine.calls
    assert message.usage.output_tokens == MAX_SEQ_LEN - len(call.prompt_token_ids)


@pytest.mark.parametrize(
    ("path", "convert"),
    [(MESSAGES_ROUTE, "chat_of_messages"), (f"{MESSAGES_ROUTE}/count_tokens", "chat_to_count")],
)
async def test_a_conversation_is_converted_outside_of_the_event_loop(
    path: str, convert: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    work = getattr(routes, convert)

    def note(*args: Any) -> Any:
        threads.append(threading.current_thread().name.partition("_")[0])
        return work(*args)

    monkeypatch.setattr(routes, convert, note)
    response = await Harness().post(path, {"messages": MESSAGES, "max_tokens": 5})
    assert response.status_code == 200, response.text
    assert threads == ["text"]


@pytest.mark.parametrize(
    ("edit", "status"),
    [
        ({"type": "clear_thinking_20251015", "keep": "all"}, 200),  # as Claude Code sends it
        ({"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}, 400),
        ({"type": "clear_tool_uses_20250919"}, 400),
    ],
)
async def test_only_edits_that_keep_the_conversation_are_accepted(edit: object, status: int) -> None:
    harness = Harness()
    body = {"messages": MESSAGES, "max_tokens": 9, "context_management": {"edits": [edit]}}
    response = await harness.post(MESSAGES_ROUTE, body)
    assert response.status_code == status, response.text
    assert ("context_management" in response.text) == (status == 400)
    assert "x-ignored-fields" not in response.headers
