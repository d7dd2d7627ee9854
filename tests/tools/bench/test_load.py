from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx
import pytest
import pytest_asyncio

from shortfin_apps.llm.tools.bench.load import BenchRequest, PassResult, measure, run_campaign, run_pass
from shortfin_apps.llm.tools.bench.stats import RequestRecord
from shortfin_apps.llm.tools.bench.target import TargetOptions, http_client, open_target
from shortfin_apps.llm.tools.bench.workload import Workload
from tests.scripted_server import (
    DONE,
    TIMEOUT_S,
    Answer,
    ScriptedServer,
    completes,
    completion_event,
    event,
    says,
    streams,
    usage,
    usage_event,
)

COMPLETIONS = "/v1/completions"
REQUEST = BenchRequest([1, 2, 3], 3)


@pytest_asyncio.fixture
async def http(server: ScriptedServer) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(server.url, timeout_s=TIMEOUT_S) as client:
        yield client


async def test_requests_have_fixed_length(http: httpx.AsyncClient, server: ScriptedServer) -> None:
    server.on(COMPLETIONS, completes(["a", "b", "c"]))
    await measure(http, "tiny", REQUEST)
    assert server.bodies() == [
        {
            "model": "tiny",
            "prompt": [1, 2, 3],
            "max_tokens": 3,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


async def test_times_are_in_order(http: httpx.AsyncClient, server: ScriptedServer) -> None:
    server.on(COMPLETIONS, completes(["a", "b", "c"]))
    record = await measure(http, None, REQUEST)
    assert record.error is None
    assert len(record.chunks_s) == 3
    assert [record.sent_s, *record.chunks_s] == sorted([record.sent_s, *record.chunks_s])
    assert record.ended_s == record.chunks_s[-1]
    assert (record.prompt_tokens, record.output_tokens, record.asked_output_tokens) == (3, 3, 3)


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
async def test_pieces_of_any_size_give_the_same_counts(
    http: httpx.AsyncClient, server: ScriptedServer, size: int
) -> None:
    whole = (
        completion_event("two tokens")
        + b": ping\r\n\r\n"
        + completion_event(" and three more").replace(b"\n", b"\r\n")
        + completion_event("", "length")  # says why it ended, brings no token
        + usage_event(3, 5, 2)
        + DONE
    )
    server.on(COMPLETIONS, streams(*(whole[i : i + size] for i in range(0, len(whole), size))))
    record = await measure(http, None, REQUEST)
    assert record.error is None
    assert len(record.chunks_s) == 2
    assert (record.output_tokens, record.cached_tokens) == (5, 2)


async def test_a_last_chunk_with_text_reason_and_usage_counts_once(
    http: httpx.AsyncClient, server: ScriptedServer
) -> None:
    last = {"choices": [{"text": "b", "finish_reason": "length"}], "usage": usage(3, 2)}
    server.on(COMPLETIONS, streams(completion_event("a"), event(last)))
    record = await measure(http, None, REQUEST)
    assert (len(record.chunks_s), record.output_tokens) == (2, 2)


async def test_an_empty_chunk_ahead_of_the_end_is_a_token_without_text(
    http: httpx.AsyncClient, server: ScriptedServer
) -> None:
    server.on(COMPLETIONS, streams(completion_event(""), completion_event("a", "length"), usage_event(3, 2)))
    assert len((await measure(http, None, REQUEST)).chunks_s) == 2


async def test_without_usage_chunks_are_counted(http: httpx.AsyncClient, server: ScriptedServer) -> None:
    server.on(COMPLETIONS, streams(completion_event("a"), completion_event("b", "length"), DONE))
    assert (await measure(http, None, REQUEST)).output_tokens == 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (says({"error": {"message": "full"}}, 429), "full"),
        (streams(completion_event("a"), event({"error": {"message": "device lost"}})), "device lost"),
        (streams(DONE), "contained no completion"),
        (streams(b"data: {\n\n"), "unreadable"),
        (streams(b"data: 3\n\n"), "other than completions"),
        (streams(event({"choices": [3]})), "unreadable"),
    ],
)
async def test_a_failure_is_a_record(
    http: httpx.AsyncClient, server: ScriptedServer, answer: object, message: str
) -> None:
    server.on(COMPLETIONS, answer)  # type: ignore[arg-type]
    record = await measure(http, None, REQUEST)
    assert record.error is not None
    assert message in record.error


async def test_a_lost_connection_is_a_record(server: ScriptedServer) -> None:
    async with http_client("http://127.0.0.1:1", timeout_s=TIMEOUT_S) as http:
        record = await measure(http, None, REQUEST)
    assert record.error == "the connection failed (ClientConnectorError)"


@pytest.mark.parametrize("concurrency", [1, 3, 16])
async def test_every_request_is_sent_and_the_bound_is_kept(
    http: httpx.AsyncClient, server: ScriptedServer, concurrency: int
) -> None:
    server.on(COMPLETIONS, completes(["a"]))
    ended: list[RequestRecord] = []
    records = await run_pass(http, None, [BenchRequest([n], 1) for n in range(12)], concurrency, ended.append)
    assert records == ended
    assert sorted(body["prompt"] for body in server.bodies()) == [[n] for n in range(12)]
    assert 1 <= server.peak <= concurrency
    if concurrency > 1:
        assert server.peak > 1


async def test_each_client_has_a_connection() -> None:
    """The server answers nobody before all have connected."""
    clients = 120
    all_are_here = asyncio.Barrier(clients)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}}")
        await all_are_here.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        writer.write(completion_event("a", "length") + DONE)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, http_client(f"http://127.0.0.1:{port}", timeout_s=TIMEOUT_S) as http:
        records = await run_pass(http, None, [REQUEST] * clients, clients)
    assert [record.error for record in records] == [None] * clients


PLAIN = Workload(name="P", about="", prompt_tokens=(40, 20, 30), output_tokens=2, concurrency=2)
SHARED = Workload(
    name="S", about="", prompt_tokens=(32, 32), output_tokens=1, concurrency=2, shared_prefix_tokens=64
)


def letters() -> Answer:
    return lambda request, body: says({"tokens": list(body["prompt"].encode())})(request, body)


async def campaign(
    server: ScriptedServer, workloads: list[Workload], labels: str = "a", repeats: int = 1
) -> tuple[list[PassResult], list[str]]:
    """The results and the order of passes; all labels are the same server."""
    server.on("/tokenize", letters())
    server.on("/v1/completions", completes(["x", "y"]))
    began: list[str] = []
    async with AsyncExitStack() as stack:
        options = TargetOptions(model="tiny")
        targets = [await stack.enter_async_context(open_target(x, server.url, options)) for x in labels]
        run = run_campaign(targets, workloads, repeats, "seed", began.append, lambda _: None)
        results = [result async for result in run]
    return results, began


async def test_a_request_warms_up_and_is_not_measured(server: ScriptedServer) -> None:
    (result,), _ = await campaign(server, [PLAIN])
    assert (result.target, result.workload, result.repeat) == ("a", "P", 0)
    assert (result.summary.requests, result.summary.output_tokens) == (3, 6)
    warm_up, *measured = [body["prompt"] for body in server.bodies()]
    assert len(warm_up) == 40
    assert sorted(map(len, measured)) == [20, 30, 40]


async def test_no_two_prompts_share_a_beginning(server: ScriptedServer) -> None:
    await campaign(server, [PLAIN], labels="ab", repeats=2)
    starts = {tuple(body["prompt"][:16]) for body in server.bodies()}
    assert len(starts) == len(server.bodies()) == 2 * 2 * 4


async def test_the_warm_pass_repeats_the_prefix_with_new_tokens(server: ScriptedServer) -> None:
    results, _ = await campaign(server, [SHARED])
    assert [result.workload for result in results] == ["Sc", "Sw"]
    warm_up, *prompts = [body["prompt"] for body in server.bodies()]
    prefix = prompts[0][:64]
    assert all(prompt[:64] == prefix for prompt in prompts)
    assert len({tuple(prompt[64:80]) for prompt in prompts}) == 4
    assert warm_up[:16] != prefix[:16], "the cold pass finds the prefix cold"


async def test_repeats_have_prefixes_of_their_own(server: ScriptedServer) -> None:
    await campaign(server, [SHARED], repeats=2)
    assert len({tuple(body["prompt"][:64]) for body in server.bodies()}) == 2 + 2  # and two warm-ups


async def test_servers_alternate_in_going_first(server: ScriptedServer) -> None:
    results, began = await campaign(server, [PLAIN], labels="ab", repeats=2)
    assert began == ["P on a", "P on b", "P on b", "P on a"]
    assert [(r.target, r.repeat) for r in results] == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]
