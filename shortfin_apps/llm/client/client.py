"""The asyncio client: a connection pool to one server."""

from __future__ import annotations

import asyncio
import itertools
import random as random_module
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, Self, Unpack

import httpx
import orjson
from httpx_sse import EventSource, SSEError

from shortfin_apps.llm.client.answers import (
    ChatOptions,
    Chunk,
    Generation,
    Message,
    Prompt,
    Sampling,
    parse_chunk,
    parse_generation,
)
from shortfin_apps.llm.client.errors import (
    ConnectionFailedError,
    ServerError,
    error_from_response,
    streamed_error,
)
from shortfin_apps.llm.client.sending import (
    DEFAULT_URL,
    RetryPolicy,
    bearer,
    checked_fields,
    checked_prompt,
    checked_timeout,
    parse_retry_after,
    together,
)
from shortfin_apps.llm.contract.errors import InvalidRequestError, LlmError, UnavailableError
from shortfin_apps.llm.lone_surrogates import json_of

HIGHEST_PORT = 65_535
_EMPTY = Chunk("")
_RETRIED_STATUSES = (429, 503)
LOOPBACK_WITHOUT_PROXY: Mapping[str, None] = dict.fromkeys(
    ("all://127.0.0.1", "all://localhost", "all://[::1]")
)


class _Failure(NamedTuple):
    error: LlmError
    retriable: bool
    retry_after_s: float | None = None


class LlmClient:
    """A client of one server. Callers must use `async with` or call `aclose`, and use one event loop only.

    `base_url` may end in `/v1`. `timeout_s` is the maximum time without data from the server. For an answer
    that is not streamed, this is the time until the answer is complete. At most `max_concurrency` requests
    are in flight; others wait. Connections that cannot be opened and the statuses 429 and 503 are retried up
    to `max_retries` times, honouring `Retry-After`. `sleep`, `now` (Unix time) and `random` are for tests.

    Methods raise InvalidRequestError, OverloadedError, UnavailableError, RequestAbortedError or one of
    `client.errors`, all subclasses of LlmError.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        api_key: str | None = None,
        *,
        model: str | None = None,
        timeout_s: float | None = 600.0,
        connect_timeout_s: float = 10.0,
        max_retries: int = 3,
        max_concurrency: int = 64,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        now: Callable[[], float] = time.time,
        random: Callable[[], float] = random_module.random,
    ) -> None:
        self.base_url = normalised_url(base_url)
        self.max_concurrency = max_concurrency
        self._model = model
        self._sleep = sleep
        self._now = now
        self._retry = RetryPolicy(max_retries=max_retries, random=random)
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            headers=bearer(api_key),
            # `pool=None`: requests beyond `max_concurrency` wait for a connection without a time limit.
            timeout=httpx.Timeout(checked_timeout(timeout_s), connect=connect_timeout_s, pool=None),
            limits=httpx.Limits(max_connections=max_concurrency),
            # Bypass a proxy set in the environment, which could not reach this host's loopback addresses.
            mounts=LOOPBACK_WITHOUT_PROXY,
        )

    async def aclose(self) -> None:
        """Close all connections. Requests in flight fail."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def generate(self, prompt: Prompt, **sampling: Unpack[Sampling]) -> Generation:
        """Continue a prompt (`/v1/completions`)."""
        return await self._complete("/v1/completions", self._completion(prompt, sampling))

    async def chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> Generation:
        """Answer the last message of a conversation (`/v1/chat/completions`)."""
        return await self._complete("/v1/chat/completions", self._chat(messages, options))

    def stream(self, prompt: Prompt, **sampling: Unpack[Sampling]) -> AsyncGenerator[Chunk, None]:
        """Continue a prompt like `generate`, but yield the answer in chunks.

        Closing the generator disconnects, which aborts the request. `aclose` (or `contextlib.aclosing`) does
        so at once; if a loop ends by `break`, asyncio closes the generator only later.
        """
        return self._stream("/v1/completions", self._completion(prompt, sampling))

    def stream_chat(
        self, messages: Sequence[Message], **options: Unpack[ChatOptions]
    ) -> AsyncGenerator[Chunk, None]:
        """Answer a conversation like `chat`, but yield the answer in chunks, as `stream` does.

        `join_calls` joins the `tool_calls` of all chunks.
        """
        return self._stream("/v1/chat/completions", self._chat(messages, options))

    async def generate_native(self, body: Mapping[str, object]) -> Any:
        """Send `body` unchanged to this project's own route `/generate`; return the parsed JSON answer."""
        return await self._json("POST", "/generate", dict(body))

    async def generate_batch(
        self, prompts: Sequence[Prompt], *, max_concurrency: int | None = None, **sampling: Unpack[Sampling]
    ) -> list[Generation]:
        """Continue many prompts, at most `max_concurrency` at a time; return the answers in the same order.

        If a prompt fails, all others are cancelled and the error is raised.
        """
        answers: dict[int, Generation] = {}
        waiting = iter(enumerate(prompts))

        async def worker() -> None:
            for index, prompt in waiting:
                answers[index] = await self.generate(prompt, **sampling)

        await together(worker, min(max_concurrency or self.max_concurrency, len(prompts)))
        return [answers[index] for index in range(len(prompts))]

    async def models(self) -> list[str]:
        """Return the names of the server's models."""
        body = await self._json("GET", "/v1/models")
        try:
            return [str(model["id"]) for model in body["data"]]
        except (LookupError, TypeError) as error:
            raise ServerError("the server's answer to /v1/models is not a list of models") from error

    async def metrics(self) -> str:
        """Return the server's metrics in Prometheus's text format."""
        async with self._open("GET", "/metrics", None) as response:
            return (await response.aread()).decode("utf-8", "replace")

    async def server_info(self) -> dict[str, Any]:
        """Return the configuration of server and model (`/server_info`, a route of this project's server)."""
        body = await self._json("GET", "/server_info")
        if not isinstance(body, dict):
            raise ServerError("the server's answer to /server_info is not an object")
        return body

    async def health(self) -> bool:
        """Whether the server runs and its engine makes progress; False if the server does not answer."""
        return await self._probe("/health") == 200

    async def ready(self) -> bool:
        """Whether the server accepts requests. For a server without the route `/ready`, same as `health`."""
        status = await self._probe("/ready")
        return await self.health() if status == 404 else status == 200

    async def wait_ready(self, timeout_s: float = 600.0, interval_s: float = 0.2) -> None:
        """Wait until the server is ready. Raises UnavailableError if it is not within `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.ready():
                    await self._sleep(interval_s)
        except TimeoutError:
            raise UnavailableError(
                f"the server at {self.base_url} was not ready within {timeout_s:g} s; see its log"
            ) from None

    def _completion(self, prompt: Prompt, sampling: Sampling) -> dict[str, object]:
        return self._body({"prompt": checked_prompt(prompt)}, sampling)

    def _chat(self, messages: Sequence[Message], options: ChatOptions) -> dict[str, object]:
        return self._body({"messages": [dict(message) for message in messages]}, options)

    def _body(self, body: dict[str, object], sampling: Sampling) -> dict[str, object]:
        model = {} if self._model is None else {"model": self._model}
        return body | model | checked_fields(sampling)

    async def _complete(self, path: str, body: dict[str, object]) -> Generation:
        return parse_generation(await self._json("POST", path, body))

    async def _stream(self, path: str, body: dict[str, object]) -> AsyncGenerator[Chunk, None]:
        """Send a request and yield its chunks.

        Raises ConnectionFailedError unless the stream had a finish reason and `[DONE]`. A router may send
        `[DONE]` without a finish reason if its worker has died, and a connection may break before `[DONE]`.
        """
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        finished = done = False
        async with (
            self._open("POST", path, streamed) as response,
            aclosing(EventSource(response).aiter_sse()) as events,
        ):
            async for event in events:
                if event.data == "[DONE]":
                    done = True
                    continue  # the response must be read to its end, so that the connection can be reused
                chunk = _chunk(event.data)
                finished = finished or chunk.finish_reason is not None
                if chunk != _EMPTY:  # a chat's first chunk has only the role
                    yield chunk
        if not (finished and done):
            raise self._broken()

    async def _json(self, method: str, path: str, body: dict[str, object] | None = None) -> Any:
        async with self._open(method, path, body) as response:
            content = await response.aread()
        return _parse_json(content, f"the server's answer to {path}")

    async def _probe(self, path: str) -> int | None:
        """Return the status of a GET, sent once; None if there is no answer."""
        try:
            return (await self._http.get(path)).status_code
        except httpx.RequestError:
            return None

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, body: dict[str, object] | None
    ) -> AsyncIterator[httpx.Response]:
        """Send a request, with retries; yield the response (status 2xx) before its body is read.

        Leaving the context before the body's end disconnects. Raises LlmError.
        """
        response = await self._send_with_retries(method, path, body)
        try:
            with self._typed_errors():
                yield response
        finally:
            await response.aclose()

    async def _send_with_retries(
        self, method: str, path: str, body: dict[str, object] | None
    ) -> httpx.Response:
        for attempt in itertools.count():
            outcome = await self._send(method, path, body)
            if isinstance(outcome, httpx.Response):
                return outcome
            delay_s = self._retry.delay_s(attempt, outcome.retry_after_s) if outcome.retriable else None
            if delay_s is None:
                raise outcome.error
            await self._sleep(delay_s)
        raise AssertionError("itertools.count ended")

    async def _send(
        self, method: str, path: str, body: dict[str, object] | None
    ) -> httpx.Response | _Failure:
        """Send a request once; return a response with status 2xx before its body is read, or a failure."""
        content = None if body is None else json_of(body)
        headers = {"Content-Type": "application/json"} if content else None
        request = self._http.build_request(method, path, content=content, headers=headers)
        try:
            with self._typed_errors():
                response = await self._http.send(request, stream=True)
                if response.is_success:
                    return response
                reason = await response.aread()  # reading to the end releases the connection
        except ConnectionFailedError as error:
            never_sent = isinstance(error.__cause__, httpx.ConnectError | httpx.ConnectTimeout)
            return _Failure(error, retriable=never_sent)
        retry_after_s = parse_retry_after(response.headers.get("Retry-After"), self._answered_at(response))
        refused = error_from_response(response.status_code, reason, retry_after_s)
        return _Failure(refused, response.status_code in _RETRIED_STATUSES, retry_after_s)

    def _answered_at(self, response: httpx.Response) -> float:
        """Return the time of an answer by the server's clock, as a `Retry-After` date uses that clock.

        Without a valid `Date` header, return the local time.
        """
        try:
            return parsedate_to_datetime(response.headers["Date"]).timestamp()
        except (KeyError, ValueError, OverflowError):
            return self._now()

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            yield
        except SSEError as error:
            raise ServerError("the server answered a streaming request without a stream") from error
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ConnectionFailedError(
                f"no server answers at {self.base_url}; start one with `shortfin-llm serve DIR`"
            ) from error
        except httpx.TimeoutException as error:
            raise ConnectionFailedError(
                f"the server at {self.base_url} sent nothing for too long; see its log, or raise the timeout"
            ) from error
        except httpx.DecodingError as error:
            raise ServerError(
                f"the server's answer is not in the encoding that it names ({error})"
            ) from error
        except httpx.RequestError as error:
            raise self._broken() from error

    def _broken(self) -> ConnectionFailedError:
        return ConnectionFailedError(
            f"the connection to {self.base_url} broke before the answer was complete; see the server's log"
        )


def normalised_url(base_url: str) -> str:
    """Return the server's address without a trailing `/v1`. Raises InvalidRequestError."""
    if not base_url.startswith(("http://", "https://")):
        raise InvalidRequestError(
            f"the server's address {base_url!r} must begin with http:// or https://", "base_url"
        )
    try:
        url = httpx.URL(base_url)
        reason = "" if url.host and (url.port or 0) <= HIGHEST_PORT else "no host, or no port that there is"
    except httpx.InvalidURL as error:
        reason = str(error)
    if reason:
        raise InvalidRequestError(
            f"the server's address {base_url!r} must be like {DEFAULT_URL} ({reason})", "base_url"
        )
    return base_url.rstrip("/").removesuffix("/v1")


def _chunk(data: str) -> Chunk:
    event = _parse_json(data, "an event of the server's stream")
    if isinstance(event, dict) and (error := event.get("error")):
        raise streamed_error(error)
    return parse_chunk(event)


def _parse_json(content: str | bytes, what: str) -> Any:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise ServerError(f"{what} is not JSON") from error
