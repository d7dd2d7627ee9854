"""The chunks of OpenAI's streams, as events in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from shortfin_apps.llm.api.openai_shapes import Shape, usage
from shortfin_apps.llm.components.frontend.text_stream import EMPTY_ANSWER, TextDelta, TextRequest


class ChunkEvents:
    """The chunks in `shape`, and a last one with the usage if asked for; implements `Events`.

    A chunk's fields outside of `choices` are encoded once, as they are the same in all chunks.
    """

    def __init__(
        self, shape: Shape, head: dict[str, Any], requests: Sequence[TextRequest], *, with_usage: bool
    ) -> None:
        self._shape = shape
        self._requests = requests
        self._with_usage = with_usage
        self._head = {**head, "object": shape.chunk_object_name, **shape.head([])}
        if with_usage:
            self._head["usage"] = None
        self._opening = _opening(self._head)
        self._generated, self._cached = [0] * len(requests), [0] * len(requests)

    def first(self) -> bytes:
        """The chunks of requests that generate nothing."""
        empty = [index for index, request in enumerate(self._requests) if not request.generates]
        return b"".join(self._chunks(index, EMPTY_ANSWER) for index in empty)

    def of(self, index: int, delta: TextDelta) -> bytes:
        self._generated[index] += len(delta.token_ids)
        if delta.num_cached_tokens > self._cached[index]:
            self._cached[index] = delta.num_cached_tokens
        return self._chunks(index, delta)

    def last(self) -> bytes:
        if not self._with_usage:
            return b""
        totals = usage(self._requests, self._generated, self._cached)
        return b"data: " + orjson.dumps({**self._head, "choices": [], "usage": totals}) + b"\n\n"

    def _chunks(self, index: int, delta: TextDelta) -> bytes:
        return b"".join(map(self._chunk, self._shape.chunks(index, delta)))

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        chunk = self._opening + orjson.dumps(choice) + b"]}\n\n"
        if self._head.pop("prompt_token_ids", None) is not None:  # in the first chunk alone
            self._opening = _opening(self._head)
        return chunk


def _opening(head: dict[str, Any]) -> bytes:
    """A chunk up to its only choice."""
    return b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
