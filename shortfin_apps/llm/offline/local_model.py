"""A model in this process, used by calling the server's ASGI application without a connection.

So the same requests, defaults, answers and errors apply as with a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

from shortfin_apps.llm.components.engine.stats import EngineStats
from shortfin_apps.llm.offline.settings import with_model
from shortfin_apps.llm.serving.api.app import create_app
from shortfin_apps.llm.serving.frontend.metrics import ServerMetrics
from shortfin_apps.llm.serving.server.config import ServerConfig
from shortfin_apps.llm.serving.server.model_loading import (
    Loaded,
    RunningEngine,
    check_address_space,
    load_model,
    open_artifact,
    open_draft,
)
from shortfin_apps.llm.serving.server.service import make_service

Message = MutableMapping[str, Any]
App = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]

logger = logging.getLogger(__name__)


class AppAnswer:
    """The answer of an ASGI application to one request, and the application's `receive` and `send`.

    Body chunks that the caller has not read yet are kept, without a limit.
    """

    def __init__(self, body: bytes) -> None:
        self.status = 500  # unless the application sends another status
        self.headers: dict[str, str] = {}  # by lower-case name
        self._body: bytes | None = body  # None once the application has received it
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()  # None marks the end
        self._begun = asyncio.Event()
        self._ended = asyncio.Event()

    async def pieces(self) -> AsyncIterator[bytes]:
        while (piece := await self._pieces.get()) is not None:
            yield piece

    async def whole(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def begins(self) -> None:
        """Wait until `status` and `headers` are set."""
        await self._begun.wait()

    async def receive(self) -> Message:
        """Return the request's body (ASGI). Later calls wait for the answer's end and return a disconnect."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._ended.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Store a message of the application (ASGI). Must never wait: it may be called outside of a task."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {
                name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]
            }
            self._begun.set()
            return
        if piece := message.get("body", b""):
            self._pieces.put_nowait(piece)
        if not message.get("more_body", False):
            self.end()

    def end(self) -> None:
        if not self._ended.is_set():
            self._pieces.put_nowait(None)
        self._begun.set()
        self._ended.set()


@asynccontextmanager
async def calling(app: App, path: str, body: bytes) -> AsyncIterator[AppAnswer]:
    """POST a JSON body to `path`; yield the answer once it has status and headers.

    Leaving the context before the answer's end aborts the request.
    """
    answer = AppAnswer(body)
    task = asyncio.ensure_future(_run(app, _scope(path, body), answer))
    try:
        await answer.begins()
        yield answer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _run(app: App, scope: Message, answer: AppAnswer) -> None:
    try:
        await app(scope, answer.receive, answer.send)
    except Exception as error:  # Starlette answers 500 and re-raises
        logger.error("a request failed", exc_info=error)
    finally:
        answer.end()


def _scope(path: str, body: bytes) -> Message:
    headers = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body))}
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("ascii"),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()],
        "server": ("localhost", None),
        "client": None,
        "state": {},
    }


class Places:
    """A fair semaphore: a request holds a place for each of its sequences while the engine computes them.

    `total` is the number of sequences that the engine admits. Waiting requests get places in order of
    arrival, so that a request with many sequences does not starve. Callers must use it in one event loop.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = total
        self._first = asyncio.Lock()  # held by the first waiting request; asyncio's locks are fair
        self._left = asyncio.Event()  # set and replaced by a new one when a request returns its places
        self.num_left = 0  # requests that have returned their places so far

    @asynccontextmanager
    async def taken(self, count: int) -> AsyncIterator[None]:
        """Wait for `count` places (at most `total`), and hold them during the context."""
        count = min(count, self.total)
        async with self._first:
            while count > self._free:
                await self._left.wait()
            self._free -= count
        try:
            yield
        finally:
            self._free += count
            self.num_left += 1
            self._left.set()
            self._left = asyncio.Event()

    def are_all_free_but(self, count: int) -> bool:
        """Whether only one request, with `count` places, holds any places."""
        return self._free + min(count, self.total) >= self.total

    async def another_leaves(self, num_left: int, timeout_s: float) -> None:
        """Wait until more than `num_left` requests have returned their places, at most for `timeout_s`."""
        if self.num_left > num_left:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._left.wait()


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OK, FULL = 200, 429
MAX_ALONE = 5  # refused attempts of a request while no other request runs
POLL_S = 0.01
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Answered:
    """A complete answer of a local model or a server, with any status."""

    status: int
    body: bytes
    request_id: str | None
    retry_after_s: float = RETRY_AFTER_S  # set for a 429


class LocalModel:
    """A loaded model. Callers must call `post` and `stream` during `running`, in the same event loop."""

    def __init__(self, name: str, app: App, loaded: Loaded) -> None:
        self.name = name
        self._app = app
        self._loaded = loaded
        self._places = Places(loaded.engine.max_requests)

    @classmethod
    def load(cls, config: ServerConfig) -> Self:
        """Build the model if it is a source, load it and warm it up. Takes seconds or more.

        Raises ArtifactError, BuildError and other LlmErrors.
        """
        config = with_model(config)
        artifact, draft = open_artifact(config), open_draft(config)
        check_address_space([artifact, *([draft] if draft else ())], config)
        name = config.model.served_model_name or artifact.name
        metrics = ServerMetrics(name)
        service = make_service(config, name, metrics, stream_keep_alive_s=None)
        loaded = load_model(artifact, config, metrics, draft)
        service.serve(loaded.model)
        return cls(name, create_app(service), loaded)

    @property
    def max_requests(self) -> int:
        """The maximum number of sequences that run or wait in the engine."""
        return self._places.total

    @property
    def healthy(self) -> bool:
        """Whether the engine's thread runs and its device works."""
        return self._loaded.engine.healthy

    def stats(self) -> EngineStats:
        """Return the engine's counters and gauges."""
        return self._loaded.engine.stats()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the engine during the context; abort requests in progress when the context ends."""
        self._loaded.engine.start()
        try:
            yield
        finally:
            await _close(self._loaded.engine)
            self._loaded.model.generator.close()

    async def post(self, path: str, body: bytes, num_sequences: int = 1) -> Answered:
        """POST a JSON body to a route once the engine has room for its sequences; return the answer.

        An answer with status 429 is retried when another request has ended. It is returned if the request is
        refused more than MAX_ALONE times while no other runs.
        """
        async with self._places.taken(num_sequences):
            num_alone = 0
            while True:
                num_left = self._places.num_left
                answered = await self._post(path, body)
                # 429 for another reason than sequences: `max_queue_tokens`, or too many grammars to compile.
                if answered.status != FULL or num_alone == MAX_ALONE:
                    return answered
                num_alone += self._places.are_all_free_but(num_sequences)
                await self._places.another_leaves(num_left, answered.retry_after_s)

    @asynccontextmanager
    async def stream(self, path: str, body: bytes) -> AsyncIterator[AppAnswer]:
        """POST a JSON body and yield its streamed answer; leaving the context early aborts the request."""
        async with self._places.taken(1), calling(self._app, path, body) as answer:
            yield answer

    async def _post(self, path: str, body: bytes) -> Answered:
        async with calling(self._app, path, body) as answer:
            headers = answer.headers
            return Answered(
                answer.status,
                await answer.whole(),
                headers.get("x-request-id"),
                float(headers.get("retry-after", RETRY_AFTER_S)),
            )


async def _close(engine: RunningEngine) -> None:
    try:
        await engine.close()
    except RuntimeError:  # at interpreter exit no thread can be started to wait for the engine's, so poll
        while engine.healthy:
            await asyncio.sleep(POLL_S)
