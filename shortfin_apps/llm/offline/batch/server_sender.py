"""Sends the lines of a batch to a server."""

from __future__ import annotations

import asyncio
import random as random_module
import time
from collections.abc import Awaitable, Callable
from typing import Self

import httpx

from shortfin_apps.llm.client.client import LOOPBACK_WITHOUT_PROXY, normalised_url
from shortfin_apps.llm.client.errors import ConnectionFailedError
from shortfin_apps.llm.client.sending import RetryPolicy, bearer, checked_timeout, parse_retry_after
from shortfin_apps.llm.offline.batch.requests import BatchRequest
from shortfin_apps.llm.offline.local_model import Answered

RETRIED_STATUSES = (429, 502, 503, 504)


class ServerSender:
    """Sends requests to a server. Callers must use it as an async context manager.

    A request is retried after a lost connection or a status in RETRIED_STATUSES, up to `max_retries` times.
    The count restarts whenever the server answers another line, so a slow server is waited for as long as it
    makes progress. `timeout_s`: maximum time without data from the server. `sleep`, `now` (Unix time) and
    `random` are for tests.
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
        """Send a request, with retries; return the answer with any status. Raises ConnectionFailedError."""
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
        """Send a request once; return the answer or the connection's error, and `Retry-After` in seconds.

        A timeout is not retried: it raises ConnectionFailedError.
        """
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
