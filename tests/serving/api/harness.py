"""The HTTP application over a scripted engine, and in-process clients for it."""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import httpx
from fastapi import FastAPI
from fastapi.dependencies import models

from shortfin_apps.llm.serving.api.app import create_app
from shortfin_apps.llm.serving.api.limits import Limits
from shortfin_apps.llm.serving.api.responses.store import ResponseStore
from shortfin_apps.llm.serving.api.sampling import SamplingDefaults
from shortfin_apps.llm.serving.api.schema import Body
from shortfin_apps.llm.serving.api.service import ServedModel, Service
from shortfin_apps.llm.serving.dialects.dialect import NO_DIALECT, Dialect
from shortfin_apps.llm.serving.frontend.metrics import ServerMetrics
from shortfin_apps.llm.serving.frontend.text_generation import TextGenerator
from shortfin_apps.llm.serving.http.auth import KeyRing
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer
from tests.serving.api.scripted_engine import Script, ScriptedEngine, saying
from tests.serving.text.tiny_tokenizers import byte_level_tokenizer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

TOKENIZER = byte_level_tokenizer()
MAX_SEQ_LEN = 128
MAX_REQUESTS = 8
MODEL = "tiny"
BASE_URL = "http://test"
NATIVE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES_ROUTE = "/v1/responses", "/v1/messages"
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


def _forget_applications() -> None:
    """Empties FastAPI's caches of functions: those of the pages of documentation keep their application."""
    for each in vars(models).values():
        if hasattr(each, "cache_clear"):
            each.cache_clear()


class Harness:
    """An application with its scripted `engine` and a `client` that calls its routes."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        loaded: bool = True,
        limits: Limits | None = None,
        keys: KeyRing | None = None,
        cors_origins: Sequence[str] = (),
        tokenizer: Tokenizer = TOKENIZER,
        strict_fields: bool = False,
        stream_keep_alive_s: float | None = None,
        root_path: str = "",
        dialect: Dialect = NO_DIALECT,
        max_seq_len: int = MAX_SEQ_LEN,
        responses: ResponseStore | None = None,
        traces: TracerProvider | None = None,
        defaults: SamplingDefaults | None = None,
    ) -> None:
        self.defaults = defaults
        self.engine = ScriptedEngine(script or saying(TOKENIZER, "the end", cached=3))
        metrics = ServerMetrics(MODEL)
        self.service = Service(
            name=MODEL,
            metrics=metrics,
            config={"port": 8000},
            limits=limits,
            strict_fields=strict_fields,
            stream_keep_alive_s=stream_keep_alive_s,
            responses=responses or ResponseStore(100, 100.0, lambda: 0.0),
            traces=traces,
            clock=lambda: 1234.5,
        )
        self.tokenizer = tokenizer
        self.dialect = dialect
        self.max_seq_len = max_seq_len
        if loaded:
            self.load(metrics)
        self.app: FastAPI = create_app(
            self.service, root_path=root_path, keys=keys, cors_origins=cors_origins
        )
        weakref.finalize(self, _forget_applications)
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url=BASE_URL)

    def load(self, metrics: ServerMetrics) -> None:
        generator = TextGenerator(
            self.tokenizer,
            self.engine,
            max_seq_len=self.max_seq_len,
            max_requests=MAX_REQUESTS,
            metrics=metrics,
            conversation_tokens=1 << 16,
        )
        self.service.serve(
            ServedModel(
                generator=generator,
                native_defaults=self.defaults or SamplingDefaults(temperature=0.0),
                openai_defaults=self.defaults or SamplingDefaults(temperature=1.0),
                exported_top_k=4,
                dialect=self.dialect,
                info={"max_seq_len": MAX_SEQ_LEN},
            )
        )

    async def post(self, path: str, body: object) -> httpx.Response:
        return await self.client.post(path, json=body)


def events_of(response: httpx.Response) -> list[Any]:
    """The JSON payloads of an event stream; asserts that it ends with `[DONE]`."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, end, rest = response.text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    return [json.loads(e.removeprefix("data: ")) for e in events]


def bodies(kind: type[Body] = Body) -> list[type[Body]]:
    """Return all kinds of bodies and their parts."""
    kinds = kind.__subclasses__()
    return list(dict.fromkeys(each for kind in kinds for each in (kind, *bodies(kind))))
