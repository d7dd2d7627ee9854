"""Encodes the chunks of OpenAI's streams as server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shortfin_apps.llm.serving.api.openai_shapes import Shape, usage
from shortfin_apps.llm.serving.frontend.text_stream import EMPTY_ANSWER, TextDelta, TextRequest
from shortfin_apps.llm.serving.http.errors import openai_shape, problem_of
from shortfin_apps.llm.serving.http.streaming import DONE, event, json_line

_MARK = "\0"  # placeholder for the text


class ChunkEvents:
    """The chunks in `shape`, and a last one with the usage on request; implements `Events`.

    Fields outside of `choices` are the same in all chunks and are encoded once. For chunks that contain only
    text, everything but the text is encoded once. With a running usage, each chunk reports its choice's usage
    so far, as in vLLM.
    """

    done = DONE

    def __init__(
        self,
        shape: Shape,
        head: dict[str, Any],
        requests: Sequence[TextRequest],
        *,
        with_usage: bool,
        with_running_usage: bool = False,
    ) -> None:
        self._shape = shape
        self._requests = requests
        self._with_usage, self._with_running_usage = with_usage, with_running_usage
        self._head = {**head, "object": shape.chunk_object_name, **shape.head([])}
        if with_usage:
            self._head["usage"] = None
        self._opening = _opening(self._head)
        self._frames: list[tuple[bytes, bytes] | None] = [None] * len(requests)  # around the text
        self._generated, self._cached = [0] * len(requests), [0] * len(requests)

    def first(self) -> bytes:
        """Return the chunks of requests that generate no tokens."""
        empty = [index for index, request in enumerate(self._requests) if not request.generates]
        return b"".join(self._chunks(index, EMPTY_ANSWER) for index in empty)

    def of(self, index: int, delta: TextDelta) -> bytes:
        self._generated[index] += len(delta.token_ids)
        if delta.num_cached_tokens > self._cached[index]:
            self._cached[index] = delta.num_cached_tokens
        frame = self._frames[index]
        if frame is not None and not delta.logprobs and delta.finish_reason is None:
            return frame[0] + json_line(delta.text) + frame[1] if delta.text else b""
        chunks = self._chunks(index, delta)
        if frame is None:
            self._frames[index] = self._frame(index)
        return chunks

    def last(self) -> bytes:
        if not self._with_usage:
            return b""
        totals = usage(self._requests, self._generated, self._cached)
        return event({**self._head, "choices": [], "usage": totals})

    def failed(self, error: Exception) -> bytes:
        return event(openai_shape(problem_of(error)))

    def _chunks(self, index: int, delta: TextDelta) -> bytes:
        if self._with_running_usage:
            self._set_usage(index)
        return b"".join(map(self._chunk, self._shape.chunks(index, delta)))

    def _set_usage(self, index: int) -> None:
        request = replace(self._requests[index], choice=0)  # `usage` counts the prompt of choice 0 only
        self._head["usage"] = usage([request], [self._generated[index]], [self._cached[index]])
        self._opening = _opening(self._head)

    def _frame(self, index: int) -> tuple[bytes, bytes] | None:
        """Return the encoded parts before and after the text of a text-only chunk; None if not yet known."""
        if self._with_running_usage or "prompt_token_ids" in self._head:
            return None
        if (choice := self._shape.plain_chunk(index, _MARK)) is None:
            return None
        before, _, after = self._chunk(choice).rpartition(json_line(_MARK))
        return before, after

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        chunk = self._opening + json_line(choice) + b"]}\n\n"
        if self._head.pop("prompt_token_ids", None) is not None:  # only in the first chunk
            self._opening = _opening(self._head)
        return chunk


def _opening(head: dict[str, Any]) -> bytes:
    """Encode a chunk up to its only choice."""
    return b"data: " + json_line(head)[:-1] + b',"choices":['
