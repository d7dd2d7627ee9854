"""Streams an answer's chunks to a program without an event loop."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import orjson

from shortfin_apps.llm.client.answers import Chunk, parse_chunk
from shortfin_apps.llm.client.errors import error_from_response, streamed_error
from shortfin_apps.llm.offline.local_model import OK, LocalModel
from shortfin_apps.llm.offline.loop_thread import LoopThread

DATA, DONE, END = b"data: ", b"[DONE]", b"\n\n"
EMPTY = Chunk("")


def stream_chunks(thread: LoopThread, model: LocalModel, path: str, body: bytes) -> Iterator[Chunk]:
    """Send the request when the first chunk is requested; closing the iterator aborts it."""
    chunks: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()

    async def read() -> None:
        async with model.stream(path, body) as answer:
            if answer.status != OK:
                raise error_from_response(answer.status, await answer.whole(), None)
            async for piece in answer.pieces():
                for chunk in chunks_of(piece):
                    chunks.put(chunk)

    work = thread.work(read())
    work.ended.add_done_callback(lambda _: chunks.put(None))
    try:
        thread.begin(work)
        while (chunk := chunks.get()) is not None:
            yield chunk
        work.ended.result()  # raises the error that ended it
    finally:
        work.cancel()


def chunks_of(piece: bytes) -> Iterator[Chunk]:
    """Yield the chunks in complete server-sent events, without comments. Raises an error sent in one."""
    for event in piece.split(END):
        if event.startswith(DATA) and (data := event.removeprefix(DATA)) != DONE:
            parsed = orjson.loads(data)
            if "error" in parsed:
                raise streamed_error(parsed["error"])
            if (chunk := parse_chunk(parsed)) != EMPTY:
                yield chunk
