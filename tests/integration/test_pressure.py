"""Too few pages, too many requests and disconnecting clients, on a server process with 24 pages."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson
import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from tests.integration.server_process import PATIENCE_S, Service, start, stop

pytestmark = pytest.mark.slow

NUM_PAGES, MAX_RUNNING, MAX_QUEUE = 24, 4, 4
STRIDE = 16
PLACES = MAX_RUNNING + MAX_QUEUE
# Four of these need more pages than there are, so some are preempted on the way.
LENGTH = 7 * STRIDE
RUNNING, WAITING, ENDED = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:request_success_total",
)
PROMPTS = [[token % 200 + 3 for token in range(start, start + 20)] for start in range(PLACES)]


@pytest.fixture(scope="module")
def service(tiny_artifact: Artifact) -> Iterator[Service]:
    pages = ("--pages", str(NUM_PAGES), "--max-running", str(MAX_RUNNING), "--max-queue", str(MAX_QUEUE))
    running = start(tiny_artifact, *pages)
    yield running
    assert stop(running) == 0


@asynccontextmanager
async def client_of(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=service.url, timeout=PATIENCE_S) as client:
        yield client


def body_of(prompt: list[int], max_tokens: int = LENGTH, **more: Any) -> dict[str, Any]:
    params = {"max_completion_tokens": max_tokens, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": params, **more}


async def until(service: Service, value: float, *metrics: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await asyncio.to_thread(service.metric, *metrics) != value:
            await asyncio.sleep(0)


async def test_running_out_of_pages_costs_only_time(service: Service) -> None:
    async with client_of(service) as client:
        alone = [await client.post("/generate", json=body_of(prompt)) for prompt in PROMPTS[:4]]
        before = service.metric("vllm:num_preemptions_total")
        both = await asyncio.gather(*(client.post("/generate", json=body_of(p)) for p in PROMPTS[:4]))
    for one, other in zip(alone, both, strict=True):
        assert other.status_code == 200
        [choice] = other.json()["responses"][0]["responses"]
        assert len(choice["output_ids"]) == LENGTH
        assert choice["output_ids"] == one.json()["responses"][0]["responses"][0]["output_ids"]
    assert service.metric("vllm:num_preemptions_total") > before
    assert service.metric("shortfin_llm:pages_leased") == 0


async def test_a_full_queue_is_answered_with_retry_after(service: Service) -> None:
    async with client_of(service) as client:
        posts = [client.post("/generate", json=body_of(PROMPTS[0], 300)) for _ in range(PLACES + 3)]
        answers = await asyncio.gather(*posts)
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) == 3
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert all(answer.json()["code"] == "QUEUE_FULL" for answer in refused)
    assert [a.status_code for a in answers if a not in refused] == [200] * PLACES


def test_a_batch_that_never_fits_has_no_retry_after(service: Service) -> None:
    body = {"text": ["a"] * (PLACES + 1)}
    answer = httpx.post(f"{service.url}/generate", json=body)
    assert answer.status_code == 400
    assert "can never fit" in answer.json()["error"]


def test_a_request_larger_than_all_pages_is_not_queued(service: Service) -> None:
    answer = httpx.post(f"{service.url}/generate", json=body_of([1] * (NUM_PAGES * STRIDE)))
    assert answer.status_code == 400


@pytest.mark.parametrize("num_before", [0, PLACES - 1], ids=["running", "in the queue"])
@pytest.mark.parametrize("stream", [False, True])
async def test_disconnected_clients_free_everything(service: Service, num_before: int, stream: bool) -> None:
    num_ended = service.metric(ENDED)
    bodies = [body_of(PROMPTS[0], 300, stream=stream) for _ in range(num_before + 1)]
    writers = [await send(service, body) for body in bodies]
    # On a busy machine, the first may have ended before anybody looks.
    await until(service, num_ended + len(writers), RUNNING, WAITING, ENDED)
    for writer in writers:
        writer.close()
        await writer.wait_closed()
    await until(service, 0, RUNNING, WAITING)
    assert service.metric("shortfin_llm:pages_leased") == 0


async def test_slow_senders_do_not_block_others(service: Service) -> None:
    host, port = address_of(service)
    half_asked = [socket.create_connection((host, port)) for _ in range(50)]
    for number, connection in enumerate(half_asked):
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{"[: number * 2])
    async with client_of(service) as client:
        assert (await client.post("/generate", json=body_of(PROMPTS[0], 2))).status_code == 200
    for connection in half_asked:
        connection.close()


def address_of(service: Service) -> tuple[str, int]:
    url = httpx.URL(service.url)
    assert url.port is not None
    return url.host, url.port


async def send(service: Service, body: dict[str, Any]) -> asyncio.StreamWriter:
    """Posts to /generate on a connection of its own and leaves the answer unread."""
    _, writer = await asyncio.open_connection(*address_of(service))
    content = orjson.dumps(body)
    head = "POST /generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    await writer.drain()
    return writer
