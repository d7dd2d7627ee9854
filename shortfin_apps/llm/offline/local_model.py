"""A model in this process, used through the server's routes without a connection.

Requests, defaults, answers and errors are therefore identical to the server's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

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
    """An application's answer. Unread pieces are kept without limit."""

    def __init__(self, body: bytes) -> None:
        self.status = 500  # kept if the application ends without an answer
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
        """Return the request's body; later calls wait for the end of the answer."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._ended.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Add a message. Never waits, as the application may call it outside of a task."""
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
    """POST JSON and yield the answer once it has started; leaving the context early ends the request."""
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
    except Exception as error:  # Starlette re-raises errors that it has answered with 500
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
    """As many places as the engine admits sequences; a request takes one for each of its sequences.

    Waiting requests are served in order of arrival, so that a request with many sequences is not overtaken
    forever. For one event loop.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = total
        self._first = asyncio.Lock()  # held by the first of the waiting requests; a lock is fair
        self._left = asyncio.Event()  # set, and replaced, when a request leaves
        self.num_left = 0  # requests that have returned their places so far

    @asynccontextmanager
    async def taken(self, count: int) -> AsyncIterator[None]:
        """Hold `count` places, or all if there are fewer, during the context."""
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
        """Whether all places are free, except for the `count` of one request."""
        return self._free + min(count, self.total) >= self.total

    async def another_leaves(self, num_left: int, timeout_s: float) -> None:
        """Wait until more than `num_left` requests have left, or for `timeout_s`."""
        if self.num_left > num_left:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._left.wait()


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OK, FULL = 200, 429
MAX_ALONE = 5  # attempts that are refused although nothing else runs
POLL_S = 0.01
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Answered:
    """A complete answer of a route or a server, with any status."""

    status: int
    body: bytes
    request_id: str | None
    retry_after_s: float = RETRY_AFTER_S  # set for a 429


class LocalModel:
    """A loaded model. Its engine runs within `running`; call the other methods in the same event loop."""

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
        """Whether the engine works."""
        return self._loaded.engine.healthy

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answer requests during the context; at its end, requests in progress are aborted."""
        self._loaded.engine.start()
        try:
            yield
        finally:
            await _close(self._loaded.engine)
            self._loaded.model.generator.close()

    async def post(self, path: str, body: bytes, num_sequences: int = 1) -> Answered:
        """Answer a JSON body of a route, after waiting until the engine has room for its sequences."""
        async with self._places.taken(num_sequences):
            num_alone = 0
            while True:
                num_left = self._places.num_left
                answered = await self._post(path, body)
                # 429 is still possible: `max_queue_tokens` is exceeded, or grammars are being compiled.
                if answered.status != FULL or num_alone == MAX_ALONE:
                    return answered
                num_alone += self._places.are_all_free_but(num_sequences)
                await self._places.another_leaves(num_left, answered.retry_after_s)

    @asynccontextmanager
    async def stream(self, path: str, body: bytes) -> AsyncIterator[AppAnswer]:
        """Yield a streamed answer; leaving the context early aborts the request."""
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
    except RuntimeError:  # at interpreter exit, no thread can be started to wait; the engine's will stop
        while engine.healthy:
            await asyncio.sleep(POLL_S)
