from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio
from starlette.responses import PlainTextResponse

from shortfin_apps.llm.client import (
    AuthenticationError,
    Chunk,
    ConnectionFailedError,
    LlmClient,
    ServerError,
    Usage,
)
from shortfin_apps.llm.contract.errors import InvalidRequestError, LlmError, OverloadedError, UnavailableError
from tests.scripted_server import (
    DONE,
    TIMEOUT_S,
    ScriptedServer,
    completes,
    completion_event,
    event,
    says,
    streams,
    usage,
    usage_event,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PARIS = {"choices": [{"text": " Paris", "finish_reason": "stop"}], "usage": usage(5, 1)}
FULL = {"error": {"message": "full", "param": None}}
# What a gateway sends when the connection to its worker breaks; `[DONE]` follows.
WORKER_DIED = event({"error": {"type": "stream_error", "message": "stream error: connection reset"}})
QUESTION = [{"role": "user", "content": "Hello"}]


class Sleeper:
    """Records the requested sleeps and returns at once."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)


@pytest.fixture
def sleeper() -> Sleeper:
    return Sleeper()


@pytest_asyncio.fixture
async def client(server: ScriptedServer, sleeper: Sleeper) -> AsyncIterator[LlmClient]:
    made = LlmClient(server.url, timeout_s=TIMEOUT_S, sleep=sleeper, now=lambda: 0.0, random=lambda: 0.0)
    async with made:
        yield made


@pytest.fixture
def nobodys_url() -> Iterator[str]:
    with socket.socket() as reserved:  # bound but not listening: connections are refused
        reserved.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{reserved.getsockname()[1]}"


async def test_generate_sends_openais_body_and_reads_its_answer(
    client: LlmClient, server: ScriptedServer
) -> None:
    server.on(COMPLETIONS, says(PARIS))
    answer = await client.generate(
        "The capital", max_tokens=3, temperature=0, top_k=4, min_p=0.1, stop=["\n"], ignore_eos=True
    )
    assert (answer.text, answer.finish_reason, answer.usage) == (" Paris", "stop", Usage(5, 1))
    assert server.bodies() == [
        {
            "prompt": "The capital",
            "max_tokens": 3,
            "temperature": 0,
            "top_k": 4,
            "min_p": 0.1,
            "stop": ["\n"],
            "ignore_eos": True,
        }
    ]


async def test_token_ids_are_a_prompt_too(client: LlmClient, server: ScriptedServer) -> None:
    server.on(COMPLETIONS, says(PARIS))
    await client.generate(range(3))
    assert server.bodies()[0]["prompt"] == [0, 1, 2]


async def test_several_prompts_in_place_of_one_are_refused(client: LlmClient, server: ScriptedServer) -> None:
    prompts: Any = ["Paris", "London"]  # their answers would be mixed in one stream, or all but one lost
    with pytest.raises(InvalidRequestError, match="`prompt` must be one text"):
        await client.generate(prompts)
    with pytest.raises(InvalidRequestError, match="`prompt` must be one text"):
        client.stream(prompts)


async def test_numbers_that_json_would_drop_are_refused(client: LlmClient, server: ScriptedServer) -> None:
    with pytest.raises(InvalidRequestError, match="`temperature` must be a finite number, not nan"):
        await client.chat(QUESTION, temperature=math.nan)


async def test_chat_sends_the_messages(client: LlmClient, server: ScriptedServer) -> None:
    server.on(CHAT, says({"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}]}))
    assert (await client.chat(QUESTION, seed=7)).text == "Hi"
    assert server.bodies(CHAT) == [{"messages": QUESTION, "seed": 7}]


async def test_every_request_has_the_key_and_the_model(server: ScriptedServer) -> None:
    server.on(COMPLETIONS, says(PARIS))
    async with LlmClient(server.url + "/v1/", "secret", model="tiny") as client:
        await client.generate("x")
    assert server.seen[0].headers["authorization"] == "Bearer secret"
    assert server.seen[0].body["model"] == "tiny"


async def test_a_stream_yields_text_then_reason_then_usage(client: LlmClient, server: ScriptedServer) -> None:
    pieces = completion_event("The ") + completion_event("end"), b": ping\n\n", completion_event("", "stop")
    server.on(COMPLETIONS, streams(*pieces, usage_event(5, 2, 4), DONE))
    chunks = [chunk async for chunk in client.stream("x")]
    assert chunks == [Chunk("The "), Chunk("end"), Chunk("", "stop"), Chunk("", usage=Usage(5, 2, 4))]
    assert server.bodies()[0]["stream_options"] == {"include_usage": True}


async def test_an_event_cut_anywhere_is_one_event(client: LlmClient, server: ScriptedServer) -> None:
    whole = completion_event("über", "stop") + DONE
    server.on(COMPLETIONS, streams(*(whole[i : i + 1] for i in range(len(whole)))))
    assert [chunk async for chunk in client.stream("x")] == [Chunk("über", "stop")]


async def test_a_chat_stream_skips_empty_chunks(client: LlmClient, server: ScriptedServer) -> None:
    deltas = [{"role": "assistant", "content": ""}, {"content": "Hi"}, {}]
    events = [event({"choices": [{"delta": d, "finish_reason": None if d else "stop"}]}) for d in deltas]
    server.on(CHAT, streams(*events, DONE))
    assert [chunk async for chunk in client.stream_chat(QUESTION)] == [Chunk("Hi"), Chunk("", "stop")]


async def test_closing_a_stream_disconnects_at_once(client: LlmClient, server: ScriptedServer) -> None:
    server.on(COMPLETIONS, server.endless(completion_event("a")))
    async with aclosing(client.stream("x")) as chunks:
        assert await anext(chunks) == Chunk("a")
        assert not server.disconnected.is_set()
    assert await asyncio.to_thread(server.disconnected.wait, TIMEOUT_S)


async def test_leaving_a_loop_disconnects(client: LlmClient, server: ScriptedServer) -> None:
    server.on(COMPLETIONS, server.endless(completion_event("a")))
    async for _ in client.stream("x"):
        break
    assert await asyncio.to_thread(server.disconnected.wait, TIMEOUT_S)


async def test_cancelling_a_reader_disconnects(client: LlmClient, server: ScriptedServer) -> None:
    server.on(COMPLETIONS, server.endless(completion_event("a")))
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in client.stream("x"):
            begun.set()

    reader = asyncio.create_task(read())
    await begun.wait()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert await asyncio.to_thread(server.disconnected.wait, TIMEOUT_S)


@pytest.mark.parametrize(
    ("pieces", "kind", "words"),
    [
        ([completion_event("a")], ConnectionFailedError, "broke"),
        ([], ConnectionFailedError, "broke"),
        ([DONE], ConnectionFailedError, "broke"),
        ([completion_event("a"), DONE], ConnectionFailedError, "broke"),
        ([completion_event("a", "stop")], ConnectionFailedError, "broke"),
        ([completion_event("a", "stop"), usage_event(1, 1)], ConnectionFailedError, "broke"),
        ([completion_event("a"), WORKER_DIED, DONE], ServerError, "stream error"),
        ([WORKER_DIED, DONE], ServerError, "stream error"),
        ([completion_event("a", "stop"), WORKER_DIED, DONE], ServerError, "stream error"),
        ([completion_event("a"), event({"error": {"message": "device lost"}})], ServerError, "device lost"),
        ([b"data: {\n\n"], ServerError, "not JSON"),
        ([b"data: 3\n\n"], ServerError, "no completion chunk"),
    ],
)
async def test_a_failing_stream_raises_and_is_not_retried(
    client: LlmClient, server: ScriptedServer, pieces: list[bytes], kind: type[LlmError], words: str
) -> None:
    server.on(COMPLETIONS, streams(*pieces))
    with pytest.raises(kind, match=words):
        _ = [chunk async for chunk in client.stream("x")]
    assert len(server.seen) == 1


async def test_an_answer_that_is_not_a_stream_is_an_error(client: LlmClient, server: ScriptedServer) -> None:
    server.on(COMPLETIONS, says(PARIS))
    with pytest.raises(ServerError, match="without a stream"):
        _ = [chunk async for chunk in client.stream("x")]


async def test_a_full_server_is_retried_after_its_retry_after(
    client: LlmClient, server: ScriptedServer, sleeper: Sleeper
) -> None:
    server.on(
        COMPLETIONS,
        says(FULL, 429, Retry_After="7"),
        says(FULL, 503, Retry_After="Thu, 01 Jan 1970 00:00:09 GMT", Date="Thu, 01 Jan 1970 00:00:05 GMT"),
        says(FULL, 429),
        says(PARIS),
    )
    assert (await client.generate("x")).text == " Paris"
    assert sleeper.slept == [7.0, 4.0, 0.5]  # the last one is the backoff of the third retry


async def test_a_stream_is_retried_before_it_begins(
    client: LlmClient, server: ScriptedServer, sleeper: Sleeper
) -> None:
    server.on(COMPLETIONS, says(FULL, 429), completes(["a", "b"]))
    assert "".join([chunk.text async for chunk in client.stream("x")]) == "ab"
    assert len(sleeper.slept) == 1


async def test_retries_end(client: LlmClient, server: ScriptedServer) -> None:
    server.on(COMPLETIONS, says(FULL, 429, Retry_After="2"))
    with pytest.raises(OverloadedError, match="full") as caught:
        await client.generate("x")
    assert caught.value.retry_after_s == 2
    assert len(server.seen) == 4


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, InvalidRequestError), (401, AuthenticationError), (404, InvalidRequestError), (500, ServerError)],
)
async def test_other_errors_are_not_retried(
    client: LlmClient, server: ScriptedServer, status: int, kind: type[LlmError]
) -> None:
    server.on(COMPLETIONS, says({"error": {"message": "no", "param": "stop"}}, status))
    with pytest.raises(kind, match="no"):
        await client.generate("x")
    assert len(server.seen) == 1


@pytest.mark.parametrize("content", [{"choices": []}, [], "text"])
async def test_an_invalid_answer_is_a_server_error(
    client: LlmClient, server: ScriptedServer, content: Any
) -> None:
    server.on(COMPLETIONS, says(content))
    with pytest.raises(ServerError):
        await client.generate("x")


async def test_without_a_server_the_error_says_what_to_do(nobodys_url: str) -> None:
    sleeper = Sleeper()
    async with LlmClient(nobodys_url, max_retries=2, sleep=sleeper) as client:
        with pytest.raises(ConnectionFailedError, match="shortfin-llm serve DIR"):
            await client.generate("x")
        assert len(sleeper.slept) == 2
        assert not await client.health()
        assert not await client.ready()


async def test_a_silent_server_is_an_error(server: ScriptedServer, sleeper: Sleeper) -> None:
    server.on(COMPLETIONS, server.endless(b""))
    async with LlmClient(server.url, timeout_s=0.02, sleep=sleeper) as client:
        with pytest.raises(ConnectionFailedError, match="sent nothing"):
            _ = [chunk async for chunk in client.stream("x")]
    assert sleeper.slept == []


async def test_an_answer_that_is_not_in_its_encoding_is_an_error(
    client: LlmClient, server: ScriptedServer
) -> None:
    not_zipped = says(PARIS, Content_Encoding="gzip")
    server.on(COMPLETIONS, not_zipped)
    server.on("/health", not_zipped)
    with pytest.raises(ServerError, match="encoding"):
        await client.generate("x")
    assert not await client.health()


async def test_a_date_that_no_clock_shows_is_not_used(client: LlmClient, server: ScriptedServer) -> None:
    date = "Mon, 01 Jan 99999999999999999999 00:00:00 GMT"
    server.on(COMPLETIONS, says(FULL, 503, Date=date, Retry_After=date), says(PARIS))
    assert (await client.generate("x")).text == " Paris"


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.nan])
def test_a_timeout_in_which_nothing_can_be_sent_is_refused(timeout_s: float) -> None:
    with pytest.raises(InvalidRequestError, match="more than 0 seconds") as caught:
        LlmClient(timeout_s=timeout_s)
    assert caught.value.param == "timeout"


def test_an_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="must begin with http") as caught:
        LlmClient("127.0.0.1:8000")
    assert caught.value.param == "base_url"


@pytest.mark.parametrize(
    "url",
    ["http://a:b", "http://ü..x", "http://[::1", "http://", "https://:80", "http://a:70000", "http://a\n"],
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="address") as caught:
        LlmClient(url)
    assert caught.value.param == "base_url"


@pytest.mark.parametrize("key", ["ü", "a\nb", "\udcff"])
def test_a_key_that_no_header_can_have_is_refused(key: str) -> None:
    with pytest.raises(InvalidRequestError, match="API key") as caught:
        LlmClient(api_key=key)
    assert caught.value.param == "api_key"


async def test_a_batch_keeps_its_order_and_concurrency(client: LlmClient, server: ScriptedServer) -> None:
    server.on(COMPLETIONS, lambda _, body: says({"choices": [{"text": body["prompt"]}]})(_, body))
    prompts = [str(number) for number in range(20)]
    answers = await client.generate_batch(prompts, max_concurrency=3, max_tokens=1)
    assert [answer.text for answer in answers] == prompts
    assert server.peak <= 3


async def test_a_batch_raises_its_first_error(client: LlmClient, server: ScriptedServer) -> None:
    server.on(COMPLETIONS, says(PARIS), says({"error": {"message": "too long"}}, 400))
    with pytest.raises(InvalidRequestError, match="too long"):
        await client.generate_batch(["a"] * 50, max_concurrency=2)
    assert len(server.seen) < 50


async def test_an_empty_batch_is_answered(client: LlmClient) -> None:
    assert await client.generate_batch([]) == []


async def test_a_client_has_a_maximum_concurrency(server: ScriptedServer) -> None:
    server.on(COMPLETIONS, says(PARIS))
    async with LlmClient(server.url, max_concurrency=1) as client:
        await asyncio.gather(*(client.generate("x") for _ in range(5)))
    assert server.peak == 1


async def test_models_are_listed(client: LlmClient, server: ScriptedServer) -> None:
    server.on("/v1/models", says({"data": [{"id": "tiny"}, {"id": "large"}]}), says({"nothing": 1}))
    assert await client.models() == ["tiny", "large"]
    with pytest.raises(ServerError, match="list of models"):
        await client.models()


async def test_metrics_are_text_and_the_servers_info_an_object(
    client: LlmClient, server: ScriptedServer
) -> None:
    server.on("/metrics", lambda _, __: PlainTextResponse("up 1\n"))
    server.on("/server_info", says({"version": "1"}), says([1]))
    assert await client.metrics() == "up 1\n"
    assert await client.server_info() == {"version": "1"}
    with pytest.raises(ServerError, match="not an object"):
        await client.server_info()


async def test_health_and_readiness(client: LlmClient, server: ScriptedServer) -> None:
    server.on("/health", says({}))
    server.on("/ready", says({}, 503))
    assert await client.health()
    assert not await client.ready()


async def test_a_server_without_a_ready_route_is_ready_when_healthy(
    client: LlmClient, server: ScriptedServer
) -> None:
    server.on("/health", says({}))
    assert await client.ready()


async def test_wait_ready_waits_for_a_loading_server(
    client: LlmClient, server: ScriptedServer, sleeper: Sleeper
) -> None:
    server.on("/ready", says({}, 503), says({}, 503), says({}))
    await client.wait_ready(TIMEOUT_S, interval_s=0.5)
    assert sleeper.slept == [0.5, 0.5]


async def test_wait_ready_times_out(client: LlmClient, server: ScriptedServer) -> None:
    server.on("/ready", says({}, 503))
    with pytest.raises(UnavailableError, match=r"not ready within 0\.01 s"):
        await client.wait_ready(0.01)
