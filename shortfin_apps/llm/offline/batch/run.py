"""Runs a batch: sends lines to a model or a server, and writes each result when it arrives."""

from __future__ import annotations

import asyncio
import contextlib
import random as random_module
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, Self

import httpx

from shortfin_apps.llm.client.client import (
    LOOPBACK_WITHOUT_PROXY,
    RetryPolicy,
    bearer,
    checked_timeout,
    normalised_url,
    parse_retry_after,
    together,
)
from shortfin_apps.llm.client.errors import ConnectionFailedError, error_from_response
from shortfin_apps.llm.contract.errors import UnavailableError
from shortfin_apps.llm.offline.batch.output import BatchOutput, Result, result_of
from shortfin_apps.llm.offline.batch.requests import BatchInput, BatchRequest
from shortfin_apps.llm.offline.local_model import Answered, LocalModel
from shortfin_apps.llm.offline.progress import Told

RETRIED_STATUSES = (429, 502, 503, 504)
SERVER_FAILED = 500


class LocalSender:
    """Sends to a model in this process."""

    def __init__(self, model: LocalModel) -> None:
        self._model = model

    async def send(self, request: BatchRequest) -> Answered:
        """Send a request. Raises UnavailableError if the device has failed, which is not the line's fault."""
        answered = await self._model.post(request.url, request.body, request.num_sequences)
        if answered.status >= SERVER_FAILED and not self._model.healthy:
            raise UnavailableError(
                "the device does not work any more; see the messages above, and run it again"
            )
        return answered


class ServerSender:
    """Sends to a server; use it with `async with`. `timeout_s` is the maximum time without data from it.

    Requests that the server refuses for now, or that are lost with a connection, are retried up to
    `max_retries` times. The count restarts whenever the server answers another line, so a busy server is
    waited for as long as it makes progress. `sleep`, `now` (Unix time) and `random` are for tests.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None,
        *,
        timeout_s: float,
        max_retries: int,
        concurrency: int,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        now: Callable[[], float] = time.time,
        random: Callable[[], float] = random_module.random,
    ) -> None:
        self._url = normalised_url(url)
        self._sleep = sleep
        self._now = now
        self._num_answered = 0
        self._retry = RetryPolicy(max_retries=max_retries, random=random)
        self._http = httpx.AsyncClient(
            base_url=self._url,
            headers={"Content-Type": "application/json"} | bearer(api_key),
            timeout=httpx.Timeout(checked_timeout(timeout_s), pool=None),
            limits=httpx.Limits(max_connections=concurrency),
            mounts=LOOPBACK_WITHOUT_PROXY,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def send(self, request: BatchRequest) -> Answered:
        """Send a request until it is answered. Raises ConnectionFailedError."""
        attempt, num_answered = 0, self._num_answered
        while True:
            outcome, retry_after_s = await self._send(request)
            if isinstance(outcome, Answered) and outcome.status not in RETRIED_STATUSES:
                self._num_answered += 1
                return outcome
            if self._num_answered != num_answered:
                attempt, num_answered = 0, self._num_answered
            delay_s = self._retry.delay_s(attempt, retry_after_s)
            if delay_s is not None:
                attempt += 1
                await self._sleep(delay_s)
            elif isinstance(outcome, Answered):
                return outcome
            else:
                raise outcome

    async def _send(self, request: BatchRequest) -> tuple[Answered | ConnectionFailedError, float | None]:
        """Make one attempt; return also `Retry-After`. Raises ConnectionFailedError for a timeout."""
        try:
            response = await self._http.post(request.url, content=request.body)
        except httpx.TimeoutException as error:
            raise ConnectionFailedError(
                f"{self._url} sent nothing for too long; see the server's log, or raise --timeout"
            ) from error
        except httpx.RequestError as error:
            return ConnectionFailedError(
                f"{self._url} does not answer ({error or type(error).__name__})"
            ), None
        retry_after_s = parse_retry_after(response.headers.get("Retry-After"), self._now())
        answered = Answered(response.status_code, response.content, response.headers.get("x-request-id"))
        return answered, retry_after_s


# Statuses not caused by the line itself: other lines would get the same, and a retry may succeed.
NOT_NOW = (401, 403, 429, 502, 503, 504)


class Sender(Protocol):
    """Answers requests, with a local model or a server."""

    async def send(self, request: BatchRequest) -> Answered:
        """Return the answer, with any status. Raises LlmError if there is none, for this line or for all."""
        ...


@dataclass(slots=True)
class Tally:
    """Counts of a batch: lines include earlier runs, tokens do not."""

    num_lines: int
    num_before: int  # finished by earlier runs
    num_done: int
    num_failed: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    took_s: float = 0.0

    def add(self, result: Result) -> None:
        self.num_done += 1
        self.num_failed += not result.finished.is_ok
        self.prompt_tokens += result.prompt_tokens
        self.cached_tokens += result.cached_tokens
        self.completion_tokens += result.completion_tokens


def tally_of(batch: BatchInput, output: BatchOutput) -> Tally:
    """Return the tally at the start of a run."""
    num_before = len(output.finished)
    num_failed = sum(not is_ok for is_ok in output.finished.values())
    return Tally(len(batch.lines), num_before, num_before, num_failed)


async def run_batch(
    batch: BatchInput, output: BatchOutput, sender: Sender, concurrency: int, tally: Tally, told: Told
) -> None:
    """Send all remaining lines; return once all results are on disk.

    At most `concurrency` lines are sent at once. Raises LlmError if it cannot continue. Results up to then
    are written, and another run resumes from there.
    """
    waiting = (line for line in batch.lines if line.custom_id not in output.finished)

    async def work() -> None:
        for line in waiting:
            request = batch.request(line)
            answered = await sender.send(request)
            _check_is_for_line(answered)
            result = result_of(request.custom_id, answered)
            await output.write(result)
            tally.add(result)
            told(result.completion_tokens)

    async with _synced(output):
        await together(work, min(concurrency, len(batch.lines) - len(output.finished)))


def _check_is_for_line(answered: Answered) -> None:
    """Raise LlmError for an answer that was not caused by the line itself."""
    if answered.status in NOT_NOW:
        raise error_from_response(answered.status, answered.body, None)


@asynccontextmanager
async def _synced(output: BatchOutput) -> AsyncIterator[None]:
    """Sync the output regularly during the context, and fully at its end."""
    syncing = asyncio.ensure_future(output.sync_often())
    try:
        yield
    finally:
        syncing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await syncing
        await output.sync()
