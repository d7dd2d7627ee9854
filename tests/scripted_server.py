"""A real HTTP server on a loopback port with scripted answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

TIMEOUT_S = 10.0  # generous: it takes milliseconds
Answer = Callable[[Request, Any], Response]
"""Returns the response to a request with this JSON body."""


@dataclass(frozen=True)
class Seen:
    """A received request."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


class ScriptedServer:
    """Runs in a thread, for synchronous and asyncio clients.

    `answers` maps a path to its answers, used in order; the last one is repeated. `disconnected` is set
    when a client leaves an `endless` stream. Each test has its own `url`, so that it does not see the
    cancelled requests of another test.
    """

    def __init__(self) -> None:
        self.answers: dict[str, list[Answer]] = {}
        self.seen: list[Seen] = []
        self.disconnected = threading.Event()
        self.peak = 0
        self._open: set[Request] = set()
        self._port = self._test = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}{self._prefix}"

    @property
    def _prefix(self) -> str:
        return f"/test{self._test}"

    def reset(self) -> None:
        self._test += 1
        self.answers = {}
        self.seen = []
        self.disconnected = threading.Event()
        self.peak = 0
        self._open = set()

    def on(self, path: str, *answers: Answer) -> None:
        self.answers[path] = list(answers)

    def bodies(self, path: str = "/v1/completions") -> list[Any]:
        return [seen.body for seen in self.seen if seen.path == path]

    async def _handle(self, request: Request) -> Response:
        raw = await request.body()
        prefix, path = self._prefix, request.url.path
        if not path.startswith(f"{prefix}/"):
            return Response(status_code=410)
        path = path.removeprefix(prefix)
        body = json.loads(raw) if raw else None
        self.seen.append(Seen(request.method, path, dict(request.headers), body))
        answers = self.answers.get(path)
        if not answers:
            return JSONResponse({"detail": "Not Found"}, 404)
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        open_requests = self._open
        open_requests.add(request)
        self.peak = max(self.peak, len(open_requests))
        try:
            await asyncio.sleep(0.002)  # long enough for concurrent requests to overlap
            return answer(request, body)
        finally:
            open_requests.remove(request)

    @contextmanager
    def running(self) -> Iterator[ScriptedServer]:
        app = Starlette(routes=[Route("/{path:path}", self._handle, methods=["GET", "POST"])])
        config = uvicorn.Config(app, port=0, ws="none", lifespan="off", log_config=None, date_header=False)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            thread.join(0.005)
        self._port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.should_exit = True
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()

    def endless(self, first: bytes) -> Answer:
        """A stream of `first` and then nothing, until the client disconnects."""
        disconnected = self.disconnected

        async def pieces(request: Request) -> AsyncIterator[bytes]:
            try:
                yield first
                while not await request.is_disconnected():
                    await asyncio.sleep(0.002)
            finally:
                disconnected.set()

        return lambda request, _: StreamingResponse(pieces(request), media_type="text/event-stream")


def says(body: Any, status: int = 200, **headers: str) -> Answer:
    """A JSON answer; `Retry_After` in `headers` stands for `Retry-After`."""
    fixed = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda _, __: JSONResponse(body, status, fixed)


def streams(*pieces: bytes) -> Answer:
    """A stream of these pieces, each sent separately."""

    async def sent() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece
            await asyncio.sleep(0)

    return lambda _, __: StreamingResponse(sent(), media_type="text/event-stream")


def event(payload: Any) -> bytes:
    return f"data: {json.dumps(payload)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


def completion_event(text: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}], "usage": None})


def usage_event(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> bytes:
    return event({"choices": [], "usage": usage(prompt_tokens, completion_tokens, cached_tokens)})


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def completes(words: Sequence[str]) -> Answer:
    """A complete streamed completion, one word per chunk."""
    chunks = [completion_event(word) for word in words[:-1]] + [completion_event(words[-1], "length")]
    return streams(*chunks, usage_event(3, len(words)), DONE)
