"""Routes of the page. They are not part of the stable API: a page is served by its own release."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from shortfin_apps.llm import __version__
from shortfin_apps.llm.components.engine.snapshot import Snapshot
from shortfin_apps.llm.contract.errors import LlmError
from shortfin_apps.llm.serving.api.page.assets import ASSETS, INDEX, PREFIX
from shortfin_apps.llm.serving.api.page.feed import Feed, Reader
from shortfin_apps.llm.serving.api.page.viewer import Viewer
from shortfin_apps.llm.serving.api.service import Service, service_of
from shortfin_apps.llm.serving.http.auth import caller_of
from shortfin_apps.llm.serving.http.streaming import KEEP_ALIVE, event

EVENTS = f"{PREFIX}/events"
SILENCE_S = 10.0  # send a keep-alive comment after this silence, for example during a long step


class Page:
    """The page of one server."""

    def __init__(self, service: Service) -> None:
        self.feed = Feed(self._take, lambda: service.stopping)
        self._service = service

    async def _take(self, after: int) -> Snapshot:
        return await self._service.model.generator.engine.snapshot(after)

    def routes(self) -> list[Route]:
        names = [name for name in ASSETS if name != INDEX]
        return [
            Route("/", ASSETS[INDEX].answer, methods=["GET"]),
            *(Route(f"{PREFIX}/{name}", ASSETS[name].answer, methods=["GET"]) for name in names),
            Route(EVENTS, self.events, methods=["GET"]),
        ]

    async def events(self, request: Request) -> Response:
        """Stream server-sent events: `about` with the server's constants, then a few snapshots per second.

        The last event is `end`, with the reason. Raises UnavailableError while the model loads, and
        OverloadedError if there are too many readers.
        """
        viewer = Viewer.of(caller_of(request))
        about = event(_about(request, viewer))
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        if request.scope.get("is_head"):
            return Response(headers=headers, media_type="text/event-stream")
        reader = self.feed.join(viewer)
        return _Events(_body(about, reader), headers=headers, on_end=lambda: self.feed.leave(reader))


class _Events(StreamingResponse):
    """A stream that always calls `on_end` at its end, even if its body iterator was never started."""

    media_type = "text/event-stream"

    def __init__(
        self, body: AsyncIterator[bytes], headers: Mapping[str, str], on_end: Callable[[], None]
    ) -> None:
        super().__init__(body, headers=headers)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


async def _body(about: bytes, reader: Reader) -> AsyncIterator[bytes]:
    yield b"event: about\n" + about
    try:
        while True:
            try:
                data = await asyncio.wait_for(reader.next(), SILENCE_S)
            except TimeoutError:
                yield KEEP_ALIVE
                continue
            if data is None:
                break
            yield b"data: " + data + b"\n\n"
    except LlmError as error:
        yield b"event: end\n" + event({"message": str(error)})
    else:
        yield b"event: end\n" + event({"message": "the server is stopping"})


def _about(request: Request, viewer: Viewer) -> dict[str, object]:
    """Return the server's constants for the page."""
    service = service_of(request)
    generator = service.model.generator
    stats = generator.engine.stats()
    return {
        "version": __version__,
        "model": service.name,
        "has_chat": generator.tokenizer.has_chat_template,
        "max_tokens": generator.max_seq_len,
        "max_requests": generator.engine.max_requests,
        "page_tokens": stats.page_tokens,
        "is_admin": viewer.is_admin,
        "sees_all": viewer.tenant is None,
    }
