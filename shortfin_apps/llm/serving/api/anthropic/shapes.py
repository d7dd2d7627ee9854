"""The JSON objects of answers in Anthropic's shape: content blocks, stop reasons and usage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from shortfin_apps.llm.components.request.messages import FinishReason
from shortfin_apps.llm.serving.api.blocks import Block, BlockKind
from shortfin_apps.llm.serving.api.call_arguments import UNPARSED, read_arguments
from shortfin_apps.llm.serving.api.chat import ChatTurn, end_of
from shortfin_apps.llm.serving.frontend.text_stream import TextDelta
from shortfin_apps.llm.serving.http.errors import Problem

ID_PREFIX = "msg_"
# Error types by status; for other 4xx `invalid_request_error`, for other 5xx `api_error`.
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
    """Return an error body; see `register_shape`."""
    other = "api_error" if problem.status >= 500 else "invalid_request_error"
    kind = ERROR_TYPES.get(problem.status, other)
    return {"type": "error", "error": {"type": kind, "message": problem.message}}


def message(
    head: dict[str, Any],
    blocks: Sequence[Block],
    stop: dict[str, str | None],
    usage: dict[str, int],
) -> dict[str, Any]:
    """Return a complete message; `head` has its `id` and `model`."""
    content = [content_block(block) for block in blocks]
    return {**head, "type": "message", "role": "assistant", "content": content, **stop, "usage": usage}


def content_block(block: Block) -> dict[str, Any]:
    """Return the JSON object of a block, with the text received so far."""
    match block.kind:
        case BlockKind.TEXT:
            return {"type": "text", "text": block.text}
        case BlockKind.THOUGHT:
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case BlockKind.CALL:
            called = {"type": "tool_use", "id": block.call_id, "name": block.name}
            return {**called, "input": arguments_of(block.text)}


def arguments_of(text: str) -> dict[str, Any]:
    """Parse the arguments of a call. If it was cut, return the complete ones, as Anthropic's client does.

    Calls written without a grammar may be malformed: text that is not an object is returned under the key
    UNPARSED.
    """
    value = read_arguments(text, allow_partial=True)
    try:
        orjson.dumps(value)
    except TypeError:  # an integer of more than 64 bits, which orjson cannot serialise
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
