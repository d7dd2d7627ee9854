"""The JSON objects of `/v1/responses`: the response, its output items and its usage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shortfin_apps.llm.serving.api.blocks import Block, BlockKind
from shortfin_apps.llm.serving.api.responses.schema import ResponsesBody
from shortfin_apps.llm.serving.frontend.text_stream import TextRequest

ID_PREFIX = "resp_"
ITEM_PREFIXES = {BlockKind.THOUGHT: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}
PART_TYPES = {BlockKind.THOUGHT: "reasoning_text", BlockKind.TEXT: "output_text"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts; `output_tokens` includes `thought_tokens`."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    thought_tokens: int

    def to_json(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.thought_tokens},
            "total_tokens": self.prompt_tokens + self.output_tokens,
        }


class ResponseShape:
    """Builds the JSON of one body's response. `code` makes its ids unique."""

    def __init__(
        self,
        body: ResponsesBody,
        request: TextRequest,
        *,
        code: str,
        created_at: int,
        model: str,
        is_stored: bool,
    ) -> None:
        self._body = body
        self._params = request.params
        self._code = code
        self._created_at = created_at
        self._model = model
        self._is_stored = is_stored

    @property
    def response_id(self) -> str:
        return ID_PREFIX + self._code

    def response(
        self,
        status: str,
        output: Sequence[Mapping[str, Any]] = (),
        *,
        usage: Usage | None = None,
        error: Mapping[str, Any] | None = None,
        completed_at: int | None = None,
    ) -> dict[str, Any]:
        """Return the response in this status; `incomplete` means that it reached its maximum length."""
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": completed_at,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": cut,
            "model": self._model,
            "output": list(output),
            "usage": None if usage is None else usage.to_json(),
            "store": self._is_stored,
            **self._asked(),
        }

    def _asked(self) -> dict[str, Any]:
        """Return the body's fields that a response repeats, with defaults filled in."""
        body, dumped = self._body, self._body.model_dump(by_alias=True, exclude_none=True, exclude={"input"})
        effort = None if body.reasoning is None else body.reasoning.effort
        return {
            "previous_response_id": body.previous_response_id,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "max_output_tokens": body.max_output_tokens or body.max_tokens,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": {"effort": effort, "summary": None},
            "temperature": self._params.temperature,
            "top_p": self._params.top_p,
            "text": {"format": {"type": "text"}, **dumped.get("text", {})},
            "tool_choice": dumped.get("tool_choice", "auto"),
            "tools": [_tool(tool) for tool in dumped.get("tools", ())],
            "top_logprobs": 0,
            "truncation": "disabled",
            "user": body.user,
        }

    def item_id(self, block: Block) -> str:
        return f"{ITEM_PREFIXES[block.kind]}_{self._code}_{block.index}"

    def item(self, block: Block, status: str) -> dict[str, Any]:
        """Return a block's output item; with status `in_progress` it has just started and is empty."""
        begins = status == "in_progress"
        item = {"id": self.item_id(block), "status": status}
        match block.kind:
            case BlockKind.CALL:
                called = {"call_id": block.call_id, "name": block.name}
                return item | {"type": "function_call", **called, "arguments": "" if begins else block.text}
            case BlockKind.TEXT:
                content = [] if begins else [part(block.kind, block.text)]
                return item | {"type": "message", "role": "assistant", "content": content}
            case BlockKind.THOUGHT:
                content = [] if begins else [part(block.kind, block.text)]
                return item | {"type": "reasoning", "summary": [], "content": content}


def part(kind: BlockKind, text: str) -> dict[str, Any]:
    """Return the only content part of a text or a thought."""
    known = {"type": PART_TYPES[kind], "text": text}
    return {**known, "annotations": [], "logprobs": []} if kind is BlockKind.TEXT else known


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's client requires all of these fields of a function."""
    return {"description": None, "parameters": None, "strict": None, **tool}
