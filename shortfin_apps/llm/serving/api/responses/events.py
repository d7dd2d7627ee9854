"""Encodes streams of events of `/v1/responses`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from shortfin_apps.llm.serving.api.blocks import Began, Block, BlockKind, Change, Ended, Grew
from shortfin_apps.llm.serving.api.responses.answer import ResponseAnswer
from shortfin_apps.llm.serving.api.responses.shapes import part
from shortfin_apps.llm.serving.frontend.text_stream import TextDelta
from shortfin_apps.llm.serving.http.streaming import named_event

# By kind of block: the infix of its events' names, and the field with its full text in the last of them.
TEXTS: dict[BlockKind, tuple[str, str]] = {
    BlockKind.TEXT: ("output_text", "text"),
    BlockKind.THOUGHT: ("reasoning_text", "text"),
    BlockKind.CALL: ("function_call_arguments", "arguments"),
}

Event = dict[str, Any]


class ResponseEvents:
    """The events of one response; implements `Events`. `on_end` is called with the complete response.

    The stream ends with `response.completed`, `.incomplete` or `.failed`, not `[DONE]`.
    """

    done = b""

    def __init__(self, answer: ResponseAnswer, on_end: Callable[[dict[str, Any]], None]) -> None:
        self._answer = answer
        self._shape = answer.shape
        self._on_end = on_end
        self._num_events = 0

    def first(self) -> bytes:
        response = self._shape.response("in_progress")
        return b"".join(self._of_response(kind, response) for kind in ("created", "in_progress"))

    def of(self, index: int, delta: TextDelta) -> bytes:
        changes = self._answer.add(delta)
        return b"".join(self._named(event) for change in changes for event in self._events_of(change))

    def last(self) -> bytes:
        response = self._answer.response()
        self._on_end(response)
        return self._of_response(self._answer.status, response)

    def failed(self, error: Exception) -> bytes:
        return self._of_response("failed", self._answer.failure(error))

    def _of_response(self, kind: str, response: dict[str, Any]) -> bytes:
        return self._named({"type": f"response.{kind}", "response": response})

    def _named(self, event: Event) -> bytes:
        number = self._num_events
        self._num_events += 1
        return named_event({**event, "sequence_number": number})

    def _events_of(self, change: Change) -> Iterator[Event]:
        match change:
            case Began(block):
                yield self._of_item("response.output_item.added", block, "in_progress")
                if block.kind is not BlockKind.CALL:
                    yield self._of_part("response.content_part.added", block, "")
            case Grew(block, text):
                yield self._of_text(block, "delta", {"delta": text})
            case Ended(block):
                yield self._of_text(block, "done", self._whole_text(block))
                if block.kind is not BlockKind.CALL:
                    yield self._of_part("response.content_part.done", block, block.text)
                status = self._answer.status_of(block.index)
                yield self._of_item("response.output_item.done", block, status)

    def _of_item(self, kind: str, block: Block, status: str) -> Event:
        return {"type": kind, "output_index": block.index, "item": self._shape.item(block, status)}

    def _of_part(self, kind: str, block: Block, text: str) -> Event:
        return {"type": kind, **self._place(block), "part": part(block.kind, text)}

    def _of_text(self, block: Block, kind: str, fields: Event) -> Event:
        event = {"type": f"response.{TEXTS[block.kind][0]}.{kind}", **self._place(block), **fields}
        return {**event, "logprobs": []} if block.kind is BlockKind.TEXT else event

    def _whole_text(self, block: Block) -> Event:
        whole = {TEXTS[block.kind][1]: block.text}
        return {**whole, "name": block.name} if block.kind is BlockKind.CALL else whole

    def _place(self, block: Block) -> Event:
        place = {"item_id": self._shape.item_id(block), "output_index": block.index}
        return place if block.kind is BlockKind.CALL else {**place, "content_index": 0}
