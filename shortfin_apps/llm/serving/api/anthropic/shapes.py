"""The JSON objects and events of Anthropic's answers and errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from shortfin_apps.llm.components.request.messages import FinishReason
from shortfin_apps.llm.serving.api.answer_reader import (
    Began,
    Block,
    BlockKind,
    BlockReader,
    Change,
    Ended,
    Grew,
)
from shortfin_apps.llm.serving.api.call_arguments import UNPARSED, read_arguments
from shortfin_apps.llm.serving.api.chat import ChatTurn, end_of
from shortfin_apps.llm.serving.api.receipts import receipt_field
from shortfin_apps.llm.serving.frontend.text_stream import TextDelta
from shortfin_apps.llm.serving.http.errors import CONTEXT_LENGTH_EXCEEDED, Problem, problem_of
from shortfin_apps.llm.serving.http.streaming import named_event

ID_PREFIX = "msg_"
# Status to error type; other 4xx have `invalid_request_error`, other 5xx `api_error`.
ERROR_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_shape(problem: Problem) -> dict[str, Any]:
    """Return an error body in Anthropic's format; see `register_shape`."""
    other = "api_error" if problem.status >= 500 else "invalid_request_error"
    kind = ERROR_TYPES.get(problem.status, other)
    # Anthropic's words, at which agents shorten their history.
    prefix = "prompt is too long: " if problem.code == CONTEXT_LENGTH_EXCEEDED else ""
    return {"type": "error", "error": {"type": kind, "message": prefix + problem.message}}


def message(
    head: dict[str, Any],
    blocks: Sequence[Block],
    stop: dict[str, str | None],
    usage: dict[str, int],
) -> dict[str, Any]:
    """Return a message. `head`: its `id` and `model`; `stop`: its `stop_reason` and `stop_sequence`."""
    content = [content_block(block) for block in blocks]
    return {**head, "type": "message", "role": "assistant", "content": content, **stop, "usage": usage}


def content_block(block: Block) -> dict[str, Any]:
    """Return the JSON object of a content block, with the text received so far."""
    match block.kind:
        case BlockKind.TEXT:
            return {"type": "text", "text": block.text}
        case BlockKind.THOUGHT:
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case BlockKind.CALL:
            called = {"type": "tool_use", "id": block.call_id, "name": block.name}
            return {**called, "input": arguments_of(block.text)}


def arguments_of(text: str) -> dict[str, Any]:
    """Parse the arguments of a tool call as an object.

    A truncated JSON string yields its complete members, as in Anthropic's client. A string that is not an
    object, or that has integers of more than 64 bits, is returned under the key UNPARSED.
    """
    value = read_arguments(text, allow_partial=True)
    try:
        orjson.dumps(value)
    except TypeError:  # orjson cannot serialise an integer of more than 64 bits
        return {UNPARSED: text}
    return value


def stop_of(answer: TextDelta, turn: ChatTurn, *, has_calls: bool) -> dict[str, str | None]:
    """Return the stop reason and stop sequence. Raises RequestAbortedError if the answer was aborted."""
    if end_of(answer) is FinishReason.LENGTH:
        cut = "model_context_window_exceeded" if turn.fills_context else "max_tokens"
        return {"stop_reason": cut, "stop_sequence": None}
    if isinstance(answer.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
    return {"stop_reason": "tool_use" if has_calls else "end_turn", "stop_sequence": None}


def usage_of(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, int]:
    """Return token counts. Anthropic's `input_tokens` excludes the prompt's cached tokens."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }


DELTAS: dict[BlockKind, tuple[str, str]] = {  # the type of a delta, and the delta's field with the text
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
        """Return nothing: `message_start` has the number of cached tokens, which the first delta brings."""
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
