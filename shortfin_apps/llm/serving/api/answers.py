"""Schemas of the routes' answers, for the OpenAPI document.

Routes do not use these classes; `tests/integration/test_openapi.py` validates all answers against them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

DocumentedAnswers = dict[int | str, dict[str, Any]]


class OpenAIError(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """OpenAI's error body."""

    error: OpenAIError


class NativeErrorAnswer(BaseModel):
    """Upstream shortfin's error body, on `/generate`."""

    error: str
    code: str


class State(BaseModel):
    status: str
    reason: str | None = None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: dict[str, Any] | None
    prompt_logprobs: list[dict[str, Any] | None] | None = None  # only on request, like the next two fields
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    receipt: dict[str, Any] | None = None


class CompletionAnswer(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class FunctionCall(BaseModel):
    name: str
    arguments: str


class MessageToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None  # null if there are only tool calls
    refusal: str | None
    reasoning_content: str | None = None  # if the model wrote reasoning; `reasoning` has the same text
    reasoning: str | None = None
    tool_calls: list[MessageToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: dict[str, Any] | None
    token_ids: list[int] | None = None
    receipt: dict[str, Any] | None = None


class ChatAnswer(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class ModelInfo(BaseModel):
    model_path: str
    tokenizer_path: str
    is_generation: bool
    preferred_sampling_params: dict[str, Any] | None
    max_model_len: int


class Load(BaseModel):
    server_load: int
    dp_rank: int
    num_reqs: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_tokens: int
    num_queue_tokens: int


class NativeChoice(BaseModel):
    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]


class NativePrompt(BaseModel):
    prompt: str | None
    responses: list[NativeChoice]


class GenerateAnswer(BaseModel):
    responses: list[NativePrompt]


class ServerInfo(BaseModel):
    version: str
    served_model_name: str
    server: dict[str, Any]
    model: dict[str, Any] | None


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class DetokenizeAnswer(BaseModel):
    prompt: str


class AbortedAnswer(BaseModel):
    aborted: int


class DumpAnswer(BaseModel):
    file: str
    bytes: int


class LogLevelAnswer(BaseModel):
    level: str


STATUSES = {
    400: "the request is invalid",
    401: "an API key is needed",
    403: "an admin key is needed",
    404: "the model does not exist",
    408: "the request timed out before its first token",
    413: "the body is too large",
    429: "the queue is full; Retry-After says when to retry",
    499: "the request was aborted",
    500: "the device or the server failed",
    503: "the model is loading, the server is stopping, or the device does not respond",
}


def errors(model: type[BaseModel] = ErrorAnswer) -> DocumentedAnswers:
    """Return the documentation of a route's error statuses. `model` is the schema of its error body."""
    return {status: {"model": model, "description": why} for status, why in STATUSES.items()}


def whole_or_streamed(model: type[BaseModel]) -> DocumentedAnswers:
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    events: dict[str, Any] = {"text/event-stream": {"schema": event}}
    return {200: {"model": model, "content": events, "description": "the answer, whole or as events"}}


def health(*, ok: str, not_ok: str) -> DocumentedAnswers:
    return {
        200: {"model": State, "description": ok},
        503: {"model": State, "description": not_ok},
    }
