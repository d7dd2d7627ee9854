"""Types of the requests and answers of the OpenAI routes, and parsers for the answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, TypeVar

from shortfin_apps.llm.client.errors import ServerError

ValueT = TypeVar("ValueT")

Prompt = str | Sequence[int]
"""A text, or token ids, which the server does not tokenise."""

Message = Mapping[str, Any]
"""One turn of a conversation: `{"role": "system" | "user" | "assistant" | "tool", "content": ...}`.

An assistant's turn may have `reasoning_content`, and `tool_calls` in the form of `ToolCall.message`. A tool's
turn has a `tool_call_id`: the id of the tool call whose result it is.
"""


class Sampling(TypedDict, total=False):
    """Sampling parameters and stop conditions. Missing ones have the server's defaults.

    Not in OpenAI's API: `top_k` (0: off), `min_p`, `typical_p`, `repetition_penalty`, `bad_words` (strings),
    `allowed_token_ids`, `min_tokens`, `stop_token_ids`, `ignore_eos`, `return_token_ids`,
    `cache_salt` (only prompts with the same salt share cached pages), and `receipt` (true, or "text" to
    include the prompt's text). `response_format`, or one of `json`, `regex`, `choice` and `grammar` in
    `structured_outputs`, constrains the answer's format.
    """

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    typical_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[str, float]
    bad_words: Sequence[str]
    allowed_token_ids: Sequence[int]
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    cache_salt: str
    return_token_ids: bool
    receipt: bool | str
    response_format: Mapping[str, Any]
    structured_outputs: Mapping[str, Any]


class ChatOptions(Sampling, total=False):
    """Additional fields of a chat: tools (functions that the model may call) and settings of reasoning.

    `tools` and `tool_choice` have OpenAI's format. `chat_template_kwargs`: variables for the chat template.
    """

    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    chat_template_kwargs: Mapping[str, Any]
    reasoning_effort: str
    include_reasoning: bool


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call. `arguments` is a JSON string, which may be incomplete if the answer was truncated."""

    id: str
    name: str
    arguments: str

    @property
    def message(self) -> dict[str, Any]:
        """The tool call as an element of `tool_calls` in an assistant's message."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a streamed tool call. `index` is the call's number; only its first piece has id and name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `cached_tokens`: prompt tokens found in the server's prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """A complete answer. `token_ids` and `usage` are None if the server does not send them.

    `reasoning` is the model's reasoning text, which `text` does not contain. `receipt` is set if requested.
    """

    text: str
    finish_reason: str | None
    usage: Usage | None
    token_ids: tuple[int, ...] | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    receipt: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed answer. Only the last chunks have `finish_reason`, `receipt` and `usage`."""

    text: str
    finish_reason: str | None = None
    usage: Usage | None = None
    token_ids: tuple[int, ...] | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    receipt: Mapping[str, Any] | None = None


def join_calls(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """Join the pieces of tool calls in a stream. Raises ServerError if a call's first piece is missing."""
    calls: dict[int, ToolCall] = {}
    for delta in deltas:
        if (call := calls.get(delta.index)) is not None:
            calls[delta.index] = replace(call, arguments=call.arguments + delta.arguments)
        elif delta.id is not None and delta.name is not None:
            calls[delta.index] = ToolCall(delta.id, delta.name, delta.arguments)
        else:
            raise ServerError("the server's stream continues a tool call that has not started")
    return tuple(call for _, call in sorted(calls.items()))


def parse_generation(body: Any) -> Generation:
    """Parse a complete answer of `/v1/completions` or `/v1/chat/completions`. Raises ServerError."""
    try:
        choice = body["choices"][0]
        message = choice.get("message")
        text = choice["text"] if message is None else message["content"]
        return Generation(
            _of(str, text) or "",
            _of(str, choice.get("finish_reason")),
            parse_usage(body.get("usage")),
            _token_ids(choice),
            _reasoning(message),
            join_calls(_calls(message)),
            choice.get("receipt"),
        )
    except (LookupError, TypeError, AttributeError) as error:
        raise ServerError(f"the server's answer is not a completion ({error!r})") from error


def parse_chunk(event: Any) -> Chunk:
    """Parse an event streamed by `/v1/completions` or `/v1/chat/completions`. Raises ServerError."""
    try:
        usage = parse_usage(event.get("usage"))
        if not event["choices"]:
            return Chunk("", usage=usage)
        choice = event["choices"][0]
        delta = choice.get("delta")
        text = choice["text"] if delta is None else delta.get("content")
        return Chunk(
            _of(str, text) or "",
            _of(str, choice.get("finish_reason")),
            usage,
            _token_ids(choice),
            _reasoning(delta),
            tuple(_calls(delta)),
            choice.get("receipt"),
        )
    except (LookupError, TypeError, AttributeError) as error:
        raise ServerError(f"the server's stream holds no completion chunk ({error!r})") from error


def parse_usage(usage: Any) -> Usage | None:
    """Parse a `usage` object; return None for null."""
    if usage is None:
        return None
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens") or 0
    completion = _of(int, usage.get("completion_tokens")) or 0
    return Usage(_of(int, usage["prompt_tokens"]) or 0, completion, _of(int, cached) or 0)


def _of(kind: type[ValueT], value: Any) -> ValueT | None:
    """Return `value`. Raises TypeError unless it is None or of type `kind`."""
    if value is None or isinstance(value, kind):
        return value
    raise TypeError(f"{type(value).__name__} instead of {kind.__name__}")


def _reasoning(message: Any) -> str:
    """Return the reasoning text of a message or a delta, which newer versions of vLLM name `reasoning`."""
    if message is None:
        return ""
    return _of(str, message.get("reasoning_content") or message.get("reasoning")) or ""


def _calls(message: Any) -> Iterator[ToolCallDelta]:
    """Yield the tool calls of a message or a delta. In a message, calls are numbered in order."""
    for place, call in enumerate((message or {}).get("tool_calls") or ()):
        function = call.get("function") or {}
        index = _of(int, call.get("index", place))
        arguments = _of(str, function.get("arguments")) or ""
        yield ToolCallDelta(
            place if index is None else index,
            arguments,
            _of(str, call.get("id")),
            _of(str, function.get("name")),
        )


def _token_ids(choice: Any) -> tuple[int, ...] | None:
    token_ids = choice.get("token_ids")
    return None if token_ids is None else tuple(token_ids)
