"""Encodes streams of events in Anthropic's format."""

from __future__ import annotations

from typing import Any

from shortfin_apps.llm.serving.api.anthropic.shapes import (
    content_block,
    error_shape,
    message,
    stop_of,
    usage_of,
)
from shortfin_apps.llm.serving.api.blocks import Began, Block, BlockKind, BlockReader, Change, Ended, Grew
from shortfin_apps.llm.serving.api.chat import ChatTurn
from shortfin_apps.llm.serving.api.receipts import receipt_field
from shortfin_apps.llm.serving.frontend.text_stream import TextDelta
from shortfin_apps.llm.serving.http.errors import problem_of
from shortfin_apps.llm.serving.http.streaming import named_event

DELTAS: dict[BlockKind, tuple[str, str]] = {  # the type of a delta and the field that holds its text
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.THOUGHT: ("thinking_delta", "thinking"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}


class MessageEvents:
    """The events of one message; implements `Events`. The stream ends with `message_stop`, not `[DONE]`."""

    done = b""

    def __init__(self, head: dict[str, Any], turn: ChatTurn) -> None:
        self._head = head
        self._turn = turn
        self._reader = BlockReader(turn.form)
        self._has_begun = False
        self._generated = self._cached = 0

    def first(self) -> bytes:
        """Return nothing: `message_start` holds the number of cached tokens, which is not known yet."""
        return b""

    def of(self, index: int, delta: TextDelta) -> bytes:
        self._generated += len(delta.token_ids)
        self._cached = max(self._cached, delta.num_cached_tokens)
        is_last = delta.finish_reason is not None
        changes = self._reader.read(delta.text, is_last=is_last, is_cut=delta.is_cut)
        events = self._start() + b"".join(map(_event_of, changes))
        return events + self._delta(delta) if is_last else events

    def last(self) -> bytes:
        return named_event({"type": "message_stop"})

    def failed(self, error: Exception) -> bytes:
        return named_event(error_shape(problem_of(error)))

    def _start(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        not_yet: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}
        empty = message(self._head, [], not_yet, self._usage())
        start = named_event({"type": "message_start", "message": empty})
        return start + named_event({"type": "ping"})

    def _delta(self, last: TextDelta) -> bytes:
        stop = stop_of(last, self._turn, has_calls=self._reader.has_calls)
        event = {"type": "message_delta", "delta": stop, "usage": self._usage()}
        return named_event(event | receipt_field(last))

    def _usage(self) -> dict[str, int]:
        prompt_tokens = len(self._turn.requests[0].prompt_token_ids)
        return usage_of(prompt_tokens, self._cached, self._generated)


def _event_of(change: Change) -> bytes:
    match change:
        case Began(block):
            return _start_of(block)
        case Grew(block, text):
            kind, field = DELTAS[block.kind]
            delta = {"type": kind, field: text}
            return named_event({"type": "content_block_delta", "index": block.index, "delta": delta})
        case Ended(block):
            return named_event({"type": "content_block_stop", "index": block.index})


def _start_of(block: Block) -> bytes:
    return named_event(
        {"type": "content_block_start", "index": block.index, "content_block": content_block(block)}
    )
