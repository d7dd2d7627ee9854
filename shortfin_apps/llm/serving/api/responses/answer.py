"""Answers of `/v1/responses`: collects deltas, and formats them as a response or as a stream's events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shortfin_apps.llm.components.request.messages import FinishReason
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.api.answer_reader import (
    Began,
    Block,
    BlockKind,
    BlockReader,
    Change,
    Ended,
    Grew,
)
from shortfin_apps.llm.serving.api.chat import ChatTurn, end_of
from shortfin_apps.llm.serving.api.receipts import receipt_field
from shortfin_apps.llm.serving.api.responses.schema import ResponsesBody
from shortfin_apps.llm.serving.frontend.text_stream import TextDelta, TextRequest
from shortfin_apps.llm.serving.http.errors import message_of
from shortfin_apps.llm.serving.http.streaming import named_event
from shortfin_apps.llm.serving.text.tokenizer import LONG_TEXT, Tokenizer


class ResponseAnswer:
    """Collects the answer to a turn from one or several deltas. `clock`: seconds since the epoch."""

    def __init__(
        self, shape: ResponseShape, turn: ChatTurn, tokenizer: Tokenizer, clock: Callable[[], float]
    ) -> None:
        self.shape = shape
        self._prompt_tokens = len(turn.requests[0].prompt_token_ids)
        self._reader = BlockReader(turn.form)
        self._thoughts = ThoughtTokens(tokenizer)
        self._clock = clock
        self._generated = self._cached = 0
        self._has_ended = self._is_cut = False
        self._ended_at = 0
        self._receipt: dict[str, Any] = {}

    def add(self, delta: TextDelta) -> list[Change]:
        """Add a delta; return the changes that it makes to the answer's blocks.

        For an aborted answer, raises the answer's error or RequestAbortedError.
        """
        self._generated += len(delta.token_ids)
        self._cached = max(self._cached, delta.num_cached_tokens)
        is_last = delta.finish_reason is not None
        changes = list(self._reader.read(delta.text, is_last=is_last, is_cut=delta.is_cut))
        for change in changes:
            if isinstance(change, Grew) and change.block.kind is BlockKind.THOUGHT:
                self._thoughts.push(change.text)
        if is_last:
            self._is_cut = end_of(delta) is FinishReason.LENGTH
            self._has_ended, self._ended_at = True, int(self._clock())
            self._receipt = receipt_field(delta)
        return changes

    @property
    def status(self) -> str:
        """The response's status. Callers must have added the last delta."""
        return "incomplete" if self._is_cut else "completed"

    def status_of(self, index: int) -> str:
        """Return the status of the output item at `index`, which must have ended.

        Only the answer's last item may be `incomplete`, if the answer was truncated or has not ended.
        """
        is_last = index == len(self._reader.blocks) - 1
        return "incomplete" if is_last and (self._is_cut or not self._has_ended) else "completed"

    def output(self) -> list[dict[str, Any]]:
        """Return the output items so far."""
        return [self.shape.item(block, self.status_of(block.index)) for block in self._reader.blocks]

    def response(self) -> dict[str, Any]:
        """Return the complete response. Callers must have added the last delta."""
        done = None if self._is_cut else self._ended_at
        whole = self.shape.response(self.status, self.output(), usage=self._usage(), completed_at=done)
        return whole | self._receipt

    def failure(self, error: Exception) -> dict[str, Any]:
        """Return a failed response, with the output so far.

        OpenAI has no code for other invalid requests than `invalid_prompt`.
        """
        code = "invalid_prompt" if isinstance(error, InvalidRequestError) else "server_error"
        error_field = {"code": code, "message": message_of(error)}
        return self.shape.response("failed", self.output(), usage=self._usage(), error=error_field)

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached,
            output_tokens=self._generated,
            thought_tokens=self._thoughts.num_tokens,
        )


class ThoughtTokens:
    """Counts the tokens of the reasoning text, tokenised in pieces of LONG_TEXT characters.

    Pieces of a fixed length give complete and streamed answers the same count. The count may differ slightly
    from the number of tokens that the model generated.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rest = ""
        self._num_counted = 0

    def push(self, text: str) -> None:
        """Append reasoning text; takes a few milliseconds per LONG_TEXT characters."""
        self._rest += text
        while len(self._rest) >= LONG_TEXT:
            self._num_counted += self._count(self._rest[:LONG_TEXT])
            self._rest = self._rest[LONG_TEXT:]

    @property
    def num_tokens(self) -> int:
        return self._num_counted + (self._count(self._rest) if self._rest else 0)

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))


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
    """Builds the JSON objects of the response to one body. `code`: the unique part of all ids."""

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
        """Return the response object. The status `incomplete` means that the maximum length was reached."""
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
        """Return the fields of the body that a response repeats, with defaults for missing ones."""
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
        """Return the output item of a block; with the status `in_progress`, the item is empty."""
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
    """Return the only content part of a text or reasoning item."""
    known = {"type": PART_TYPES[kind], "text": text}
    return {**known, "annotations": [], "logprobs": []} if kind is BlockKind.TEXT else known


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tool with null for missing fields, because OpenAI's client requires all these fields."""
    return {"description": None, "parameters": None, "strict": None, **tool}


# By kind of block: the infix of its events' names, and the field of its `done` event with the full text.
TEXTS: dict[BlockKind, tuple[str, str]] = {
    BlockKind.TEXT: ("output_text", "text"),
    BlockKind.THOUGHT: ("reasoning_text", "text"),
    BlockKind.CALL: ("function_call_arguments", "arguments"),
}

Event = dict[str, Any]


class ResponseEvents:
    """The events of one response; implements `Events`. `on_end`: called with the complete response.

    The stream ends with `response.completed`, `.incomplete` or `.failed`, not with `[DONE]`.
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
