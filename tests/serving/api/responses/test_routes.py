"""`/v1/responses`, by OpenAI's own client."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from shortfin_apps.llm.contract.errors import InvocationError
from shortfin_apps.llm.serving.api import limits
from shortfin_apps.llm.serving.api.responses import routes
from shortfin_apps.llm.serving.api.responses.store import ResponseStore
from shortfin_apps.llm.serving.http.auth import KeyRing
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer
from tests.serving.api.harness import MODEL, RESPONSES, TOKENIZER, Harness
from tests.serving.api.official_clients import openai_client
from tests.serving.api.scripted_engine import failing, saying
from tests.serving.api.test_tools import CALL, PARAMETERS, harness_of, prompt_of
from tests.serving.api.test_tools import TOKENIZER as TEMPLATED
from tests.serving.text.tiny_tokenizers import byte_level_backend

SILENT = Tokenizer(byte_level_backend(), {"chat_template": "hi"})  # whatever is said
TOOLS: list[Any] = [{"type": "function", "name": "f", "parameters": PARAMETERS, "strict": False}]
IMAGE = {"type": "input_image", "detail": "auto", "image_url": "http://x"}


async def response_of(harness: Harness, *, stream: bool = False, key: str = "-", **fields: Any) -> Response:
    """A response; that of a stream is the one in its last event."""
    client = openai_client(harness.app, key)
    body: dict[str, Any] = {"model": MODEL, "input": "hi", **fields}
    if not stream:
        whole: Response = await client.responses.create(**body)
        return whole
    last: Any = None
    async for event in await client.responses.create(stream=True, **body):
        last = event
    assert isinstance(last.response, Response)
    return last.response


def without_ids(response: Response) -> list[dict[str, Any]]:
    items = [item.to_dict() for item in response.output]
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_text(stream: bool) -> None:
    harness = Harness()
    response = await response_of(harness, stream=stream)
    assert (response.status, response.output_text) == ("completed", "the end")
    (call,) = harness.engine.calls
    assert response.usage is not None
    assert response.usage.input_tokens == len(call.prompt_token_ids)
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert response.usage.output_tokens == len(TOKENIZER.encode("the end")) + 1


async def test_thoughts_texts_and_calls_are_items_whole_and_streamed() -> None:
    text = f"<think>hm</think>Sure.\n{CALL}\n{CALL}"
    whole = await response_of(harness_of(text), tools=TOOLS)
    streamed = await response_of(harness_of(text), stream=True, tools=TOOLS)
    call = {"type": "function_call", "status": "completed", "name": "f", "arguments": '{"a": 1}'}
    part = {"type": "output_text", "text": "Sure.", "annotations": [], "logprobs": []}
    assert without_ids(whole) == [
        {
            "type": "reasoning",
            "status": "completed",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {"type": "message", "status": "completed", "role": "assistant", "content": [part]},
        call,
        call,
    ]
    assert without_ids(streamed) == without_ids(whole)
    assert streamed.usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens == len(TEMPLATED.encode("hm"))


async def test_the_clients_stream_follows_the_events() -> None:
    """It keeps a snapshot by the events' indices and ids, which has to be the last response."""
    harness = harness_of(f"<think>hm</think>Sure.\n{CALL}")
    numbers, arguments = [], ""
    async with openai_client(harness.app).responses.stream(model=MODEL, input="hi", tools=TOOLS) as stream:
        async for event in stream:
            numbers.append(event.sequence_number)
            if event.type == "response.function_call_arguments.delta":
                arguments = event.snapshot
        response = await stream.get_final_response()
    assert numbers == list(range(len(numbers)))
    assert (arguments, response.output_text) == ('{"a": 1}', "Sure.")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stored", [False, True])
async def test_a_loop_of_tools(stream: bool, stored: bool) -> None:
    """Call, result, and the next turn, behind the stored response or all of it sent again."""
    harness = harness_of(f"<think>hm</think>Sure.\n{CALL}")
    first = await response_of(harness, stream=stream, tools=TOOLS, instructions="Be kind.", store=stored)
    call = first.output[-1]
    assert call.type == "function_call"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    harness.engine.script = saying(TEMPLATED, "It is sunny.")
    before = [] if stored else [{"role": "user", "content": "hi"}, *(item.to_dict() for item in first.output)]
    fields = {"previous_response_id": first.id} if stored else {}
    last = await response_of(harness, stream=stream, tools=TOOLS, input=[*before, result], **fields)
    assert last.output_text == "It is sunny."
    assert prompt_of(harness).endswith(
        '[user]hi[assistant]Sure.hm{"name": "f", "arguments": {"a": 1}}[tool]sunny[assistant]'
    )
    assert "Be kind." not in prompt_of(harness), "instructions are those of one response"


async def test_instructions_come_first() -> None:
    harness = harness_of("ok")
    await response_of(harness, instructions="Be kind.")
    assert prompt_of(harness).startswith("[system]Be kind.[user]hi")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_cut_is_incomplete(stream: bool) -> None:
    response = await response_of(Harness(), stream=stream, max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    (item,) = response.output
    assert item.type == "message"
    assert item.status == "incomplete"


class City(BaseModel):
    a: int


async def test_the_clients_parse() -> None:
    harness = harness_of('{"a": 1}')
    parsed = await openai_client(harness.app).responses.parse(model=MODEL, input="hi", text_format=City)
    assert parsed.output_parsed == City(a=1)
    assert harness.engine.calls[0].params.output_grammar is not None


async def test_a_stored_response_is_told_listed_and_forgotten() -> None:
    harness = Harness()
    client = openai_client(harness.app)
    first = await response_of(harness)
    second = await response_of(
        harness, previous_response_id=first.id, input=[{"role": "user", "content": "so"}]
    )
    assert await client.responses.retrieve(second.id) == second
    listed = [item.to_dict() async for item in client.responses.input_items.list(second.id, order="asc")]
    assert [item["role"] for item in listed] == ["user", "assistant", "user"]
    pages = [item.to_dict() async for item in client.responses.input_items.list(second.id, limit=1)]
    assert pages == listed[::-1]
    await client.responses.delete(first.id)
    for lost in (
        client.responses.retrieve(first.id),
        client.responses.delete(first.id),
        response_of(harness, previous_response_id=first.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await lost
    assert (await response_of(harness, previous_response_id=second.id)).status == "completed"


async def test_a_chain_of_long_responses_is_refused_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each body is within the limits, but the conversation is not."""
    monkeypatch.setattr(limits, "MAX_CONTAINERS", 20)
    calls = [{"type": "function_call", "call_id": "1", "name": "f", "arguments": ""}] * 11
    harness = Harness(tokenizer=SILENT)
    first = await harness.post(RESPONSES, {"input": calls})
    second = await harness.post(RESPONSES, {"input": calls, "previous_response_id": first.json()["id"]})
    assert (first.status_code, second.status_code) == (200, 200)
    third = await harness.post(RESPONSES, {"input": "hi", "previous_response_id": second.json()["id"]})
    assert (third.status_code, third.json()["error"]["param"]) == (400, "previous_response_id")
    assert "more than 20 arrays and objects; begin a new one" in third.json()["error"]["message"]


async def test_conversations_are_handled_outside_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[str, str] = {}

    def noting(name: str) -> Callable[..., Any]:
        work = getattr(routes, name)

        def note(*args: Any, **kwargs: Any) -> Any:
            threads[name] = threading.current_thread().name.partition("_")[0]
            return work(*args, **kwargs)

        return note

    slow = ("items_before", "chat_of_response", "encoded", "page_of")
    for name in slow:
        monkeypatch.setattr(routes, name, noting(name))
    harness = Harness()
    first = await response_of(harness)
    second = await response_of(harness, previous_response_id=first.id)
    _ = [item async for item in openai_client(harness.app).responses.input_items.list(second.id)]
    assert threads == dict.fromkeys(slow, "text")


async def test_a_key_never_reads_the_response_to_another() -> None:
    harness = Harness(keys=KeyRing(["first", "second"], gateway_keys=["gate"]))
    response = await response_of(harness, key="first")
    assert await openai_client(harness.app, "first").responses.retrieve(response.id)
    other = openai_client(harness.app, "second")
    with pytest.raises(openai.NotFoundError):
        await other.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError):
        await other.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        await response_of(harness, key="second", previous_response_id=response.id)


async def test_tenants_of_a_gateway_have_responses_of_their_own() -> None:
    harness = Harness(keys=KeyRing(gateway_keys=["gate"]))
    alice, bob = ({"Authorization": "Bearer gate", "X-Tenant": name} for name in ("alice", "bob"))
    created = await harness.client.post(RESPONSES, json={"input": "hi"}, headers=alice)
    path = f"{RESPONSES}/{created.json()['id']}"
    assert (await harness.client.get(path, headers=alice)).status_code == 200
    assert (await harness.client.get(path, headers=bob)).status_code == 404


async def test_a_response_expires() -> None:
    now_s = 0.0
    harness = Harness(responses=ResponseStore(10, 60.0, lambda: now_s))
    response = await response_of(harness)
    now_s = 59.0
    assert await openai_client(harness.app).responses.retrieve(response.id)
    now_s = 60.0
    with pytest.raises(openai.NotFoundError):
        await openai_client(harness.app).responses.retrieve(response.id)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_is_not_to_be_stored_is_not(stream: bool) -> None:
    harness = Harness()
    response = await response_of(harness, stream=stream, store=False)
    assert harness.service.responses.num_responses == 0
    with pytest.raises(openai.NotFoundError):
        await openai_client(harness.app).responses.retrieve(response.id)


async def test_a_server_that_stores_nothing_says_so() -> None:
    harness = Harness(responses=ResponseStore(0, 60.0, lambda: 0.0))
    response = await response_of(harness)
    assert response.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError, match="this server stores none; send the whole conversation"):
        await response_of(harness, previous_response_id=response.id)
    with pytest.raises(openai.BadRequestError, match="stores no responses"):
        await response_of(harness, store=True)


async def test_a_response_without_room_says_that_it_is_not_stored() -> None:
    harness = Harness(responses=ResponseStore(9, 60.0, lambda: 0.0, max_bytes=10))
    assert (await response_of(harness)).to_dict()["store"] is False


async def test_two_requests_with_one_id_have_two_responses() -> None:
    harness = Harness()
    mine = {"X-Request-Id": "mine"}
    both = [(await harness.client.post(RESPONSES, json={"input": "hi"}, headers=mine)).json() for _ in "ab"]
    assert both[0]["id"] != both[1]["id"]


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"model": "other"}, openai.NotFoundError, "not served"),
        ({"input": []}, openai.BadRequestError, "`input`"),
        ({"background": True}, openai.BadRequestError, "`background` is not supported"),
        ({"tools": [{"type": "web_search"}]}, openai.BadRequestError, r"tools\[0\].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, openai.BadRequestError, "references"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            openai.BadRequestError,
            "images",
        ),
        ({"max_output_tokens": 0}, openai.BadRequestError, "`max_output_tokens`"),
        ({"max_output_tokens": 10**6}, openai.BadRequestError, "`max_output_tokens`"),
        ({"extra_body": {"n": 2}}, openai.BadRequestError, "`n` must be 1"),
        ({"extra_body": {"max_tokens": 2}, "max_output_tokens": 3}, openai.BadRequestError, "give one"),
        ({"reasoning": {"effort": "low"}}, openai.BadRequestError, "`reasoning.effort`"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}},
            openai.BadRequestError,
            "text.format.schema",
        ),
    ],
)
async def test_refusals_are_the_clients_exceptions(
    fields: dict[str, Any], kind: type[openai.APIStatusError], message: str
) -> None:
    harness = Harness()
    with pytest.raises(kind, match=message):
        await response_of(harness, **fields)
    assert not harness.engine.calls


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_is_an_exception(stream: bool) -> None:
    with pytest.raises(openai.InternalServerError):
        await response_of(Harness(failing(InvocationError("x"))), stream=stream)


async def test_a_failure_within_a_stream_ends_it_with_a_failed_response() -> None:
    harness = Harness(failing(InvocationError("broken"), after=TOKENIZER.encode("the ")))
    response = await response_of(harness, stream=True)
    assert (response.status, response.error and response.error.message) == ("failed", "broken")
    assert response.output_text == "the "
    assert harness.service.responses.num_responses == 0


async def test_a_stored_response_is_not_streamed_again() -> None:
    harness = Harness()
    response = await response_of(harness)
    with pytest.raises(openai.BadRequestError, match="`stream`"):
        await openai_client(harness.app).responses.retrieve(response.id, stream=True)


async def test_nothing_more_is_included() -> None:
    harness = Harness()
    response = await response_of(harness, include=["reasoning.encrypted_content"])
    path = f"{RESPONSES}/{response.id}"
    for route in (path, f"{path}/input_items"):
        for name, status in (("reasoning.encrypted_content", 200), ("web_search_call.results", 400)):
            answer = await harness.client.get(route, params={"include": name})
            assert answer.status_code == status, answer.text
    with pytest.raises(openai.BadRequestError, match="`include`"):
        await openai_client(harness.app).responses.retrieve(response.id, include=["web_search_call.results"])


@pytest.mark.parametrize("query", ["limit=0", "limit=abc", "limit=101", "order=up"])
async def test_wrong_queries_name_their_field(query: str) -> None:
    answer = await Harness().client.get(f"{RESPONSES}/resp_x/input_items?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])
