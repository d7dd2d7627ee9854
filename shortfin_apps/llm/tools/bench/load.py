"""Load generator: streams completions, records the arrival of each chunk, and runs workloads in turns.

The load generator often shares the machine with the server under test, so it spends little CPU time per
chunk: it splits raw bytes into lines, and makes one orjson call per event and one clock reading per network
read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp
import httpx
import orjson

from shortfin_apps.llm.client.answers import Usage, parse_usage
from shortfin_apps.llm.client.errors import ServerError, error_from_response, streamed_error
from shortfin_apps.llm.contract.errors import LlmError
from shortfin_apps.llm.tools.bench.stats import RequestRecord, Summary, summarise
from shortfin_apps.llm.tools.bench.target import Target
from shortfin_apps.llm.tools.bench.workload import Workload

_DATA = b"data:"
_END = b"[DONE]"


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A prompt, the number of output tokens to request, and further `fields` of the request body."""

    prompt: str | list[int]
    output_tokens: int
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class _Arrivals:
    """The output of one stream so far: `perf_counter` times of chunks with text, and the usage.

    `last_s` is the time of the last event with a choice, None before the first.
    """

    chunks_s: list[float] = field(default_factory=list)
    usage: Usage | None = None
    last_s: float | None = None


async def run_pass(
    http: httpx.AsyncClient,
    model: str | None,
    requests: Sequence[BenchRequest],
    concurrency: int,
    on_end: Callable[[RequestRecord], None] | None = None,
) -> list[RequestRecord]:
    """Send every request, at most `concurrency` at once. A failed request is a record with an `error`.

    `on_end` is called with each record as soon as its request ends.
    """
    records: list[RequestRecord] = []
    waiting = iter(requests)

    async def client() -> None:
        for request in waiting:
            records.append(await measure(http, model, request))
            if on_end is not None:
                on_end(records[-1])

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return records


async def measure(http: httpx.AsyncClient, model: str | None, request: BenchRequest) -> RequestRecord:
    """Send one streaming `/v1/completions` request. A failure is reported in the record's `error`."""
    content = orjson.dumps(_body(model, request))
    arrivals, error = _Arrivals(), None
    sent_s = time.perf_counter()
    try:
        await _stream(http, content, arrivals)
    except (httpx.HTTPError, aiohttp.ClientError) as failure:
        error = f"the connection failed ({type(failure.__cause__ or failure).__name__})"
    except LlmError as failure:
        error = str(failure)
    except (ValueError, LookupError, TypeError, AttributeError) as failure:
        error = f"the server's stream is unreadable ({type(failure).__name__})"
    ended_s = arrivals.last_s or time.perf_counter()
    # A server without `usage` in its stream most likely sends one token per chunk.
    usage = arrivals.usage or Usage(0, len(arrivals.chunks_s))
    return RequestRecord(
        sent_s=sent_s,
        ended_s=time.perf_counter() if error else ended_s,
        chunks_s=tuple(arrivals.chunks_s),
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        asked_output_tokens=request.output_tokens,
        error=error,
    )


def _body(model: str | None, request: BenchRequest) -> dict[str, object]:
    body: dict[str, object] = {
        "prompt": request.prompt,
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **request.fields,
    }
    return body if model is None else body | {"model": model}


async def _stream(http: httpx.AsyncClient, content: bytes, arrivals: _Arrivals) -> None:
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    async with http.stream("POST", "/v1/completions", content=content, headers=headers) as response:
        if not response.is_success:
            raise error_from_response(response.status_code, await response.aread(), None)
        async for now_s, data in _events(response):
            _take(orjson.loads(data), now_s, arrivals)
    if arrivals.last_s is None:
        raise ServerError("the server's stream contained no completion")


async def _events(response: httpx.Response) -> AsyncIterator[tuple[float, bytes]]:
    """Yield arrival time (`perf_counter`) and payload of each `data:` line except `[DONE]`."""
    rest = b""
    async for piece in response.aiter_raw():
        now_s = time.perf_counter()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(_DATA) and (data := line[len(_DATA) :].strip()) != _END:
                yield now_s, data


def _take(event: object, now_s: float, arrivals: _Arrivals) -> None:
    if not isinstance(event, dict):
        raise ServerError("the server's stream contains something other than completions")
    if event.get("error"):
        raise streamed_error(event["error"])
    arrivals.usage = parse_usage(event.get("usage")) or arrivals.usage
    for choice in event.get("choices") or ():
        arrivals.last_s = now_s
        # A last chunk with only a finish reason carries no token.
        if choice.get("text") or choice.get("finish_reason") is None:
            arrivals.chunks_s.append(now_s)


WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class PassResult:
    """One pass of one workload against one server."""

    target: str
    workload: str
    repeat: int
    summary: Summary


async def run_campaign(
    targets: Sequence[Target],
    workloads: Sequence[Workload],
    repeats: int,
    seed: str,
    on_pass: Callable[[str], None],
    on_end: Callable[[RequestRecord], None],
) -> AsyncIterator[PassResult]:
    """Run every workload against every server, `repeats` times. All prompts derive from `seed`.

    `on_pass` is called with a description of each workload and server before they run, `on_end` with each
    request's record. Every second repeat runs the servers in reverse order.
    """
    for repeat in range(repeats):
        for workload in workloads:
            order = targets if repeat % 2 == 0 else targets[::-1]
            for target in order:
                on_pass(f"{workload.name} on {target.label}")
                # Two addresses may be the same server, whose cache must not help the second target.
                own_seed = f"{seed}/{repeat}/{workload.name}/{target.label}"
                async for name, summary in run_workload(target, workload, own_seed, on_end):
                    yield PassResult(target.label, name, repeat, summary)


async def run_workload(
    target: Target, workload: Workload, seed: str, on_end: Callable[[RequestRecord], None] | None = None
) -> AsyncIterator[tuple[str, Summary]]:
    """Yield name and summary of each pass of a workload on one server, after one unmeasured request."""
    await _warm_up(target, workload, seed)
    for name in workload.passes:
        requests = await make_requests(target, workload, f"{seed}/{name}", f"{seed}/prefix")
        cpu_s = time.process_time()
        records = await run_pass(target.http, target.model, requests, workload.concurrency, on_end)
        yield name, summarise(records, time.process_time() - cpu_s)


async def make_requests(
    target: Target, workload: Workload, seed: str, prefix_seed: str
) -> list[BenchRequest]:
    """Return the requests of one pass; their prompts differ after the shared prefix."""
    return [
        BenchRequest(
            await target.make_prompt(f"{seed}/{index}", tokens, prefix_seed, workload.shared_prefix_tokens),
            workload.output_tokens,
        )
        for index, tokens in enumerate(workload.prompt_tokens)
    ]


async def _warm_up(target: Target, workload: Workload, seed: str) -> None:
    # A failure here is ignored: the measured requests will fail the same way and are reported.
    tokens = workload.prompt_tokens[0] + workload.shared_prefix_tokens
    prompt = await target.make_prompt(f"{seed}/warm-up", tokens, "", 0)
    await measure(
        target.http, target.model, BenchRequest(prompt, min(workload.output_tokens, WARM_UP_TOKENS))
    )
