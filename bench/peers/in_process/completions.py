"""OpenAI's `/v1/completions` for an engine without a server, as far as the benchmark's client needs it.

Prompts are token ids, decoding is greedy, and every answer has `max_tokens` tokens, one per chunk.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import uvicorn
from fastapi import APIRouter, FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from tokenizers import Tokenizer

from bench.peers.in_process.stepping import Engine, EngineThread, Generation, warm_up

MODEL = "model"
_END = b"data: [DONE]\n\n"


class CompletionBody(BaseModel):
    prompt: list[int] = Field(min_length=1)
    max_tokens: int = Field(ge=1)


class TokenizeBody(BaseModel):
    prompt: str


def serve(engine: Engine, tokenizer: Tokenizer, port: int) -> None:
    """Serve until terminated; the port opens once the engine is warm."""
    warm_up(engine)
    uvicorn.run(make_app(engine, tokenizer), host="127.0.0.1", port=port, access_log=False)


def make_app(engine: Engine, tokenizer: Tokenizer) -> FastAPI:
    thread = EngineThread(engine)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        thread.start()
        yield

    app = FastAPI(lifespan=lifespan)
    app.include_router(about)
    app.include_router(generating(thread, tokenizer))
    return app


about = APIRouter()


@about.get("/health")
async def health() -> dict[str, str]:
    return {"status": "ok"}


@about.get("/v1/models")
async def models() -> dict[str, Any]:
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "bench"}]}


def generating(thread: EngineThread, tokenizer: Tokenizer) -> APIRouter:
    """Return the routes that need the model."""
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, list[int]]:
        return {"tokens": tokenizer.encode(body.prompt, add_special_tokens=False).ids}

    @router.post("/v1/completions")
    async def completions(body: CompletionBody) -> StreamingResponse:
        generation = Generation(body.prompt, body.max_tokens)
        thread.submit(generation)
        return StreamingResponse(stream(generation, tokenizer), media_type="text/event-stream")

    return router


async def stream(generation: Generation, tokenizer: Tokenizer) -> AsyncIterator[bytes]:
    """Yield server-sent events: a chunk for each token, one with the usage, and the end."""
    for _ in range(generation.max_tokens):
        token_id = await generation.token_ids.get()
        if isinstance(token_id, Exception):
            yield _event({"error": {"message": str(token_id), "code": 500}})
            return
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        yield _event({"choices": [{"index": 0, "text": text, "finish_reason": None}]})
    yield _event({"choices": [], "usage": usage(generation)})
    yield _END


def usage(generation: Generation) -> dict[str, int]:
    prompt, output = len(generation.prompt_token_ids), generation.max_tokens
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps({"object": "text_completion", "model": MODEL} | value) + b"\n\n"
