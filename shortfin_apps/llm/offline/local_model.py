"""A model in this process, used through the server's routes without a connection.

Requests, defaults, answers and errors are therefore identical to the server's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

from shortfin_apps.llm.offline.app_call import App, AppAnswer, calling
from shortfin_apps.llm.offline.places import Places
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
        name = config.served_model_name or artifact.name
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
