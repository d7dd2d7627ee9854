"""Schemas of the answers in Anthropic's format, for the OpenAPI document; see `serving/api/answers.py`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class AnthropicError(BaseModel):
    type: str
    message: str


class AnthropicErrorAnswer(BaseModel):
    """Anthropic's error body."""

    type: Literal["error"]
    error: AnthropicError


class TextBlockAnswer(BaseModel):
    type: Literal["text"]
    text: str


class ThinkingBlockAnswer(BaseModel):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlockAnswer(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessagesUsage(BaseModel):
    """Token counts. The prompt has `input_tokens` + `cache_read_input_tokens` tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlockAnswer | ThinkingBlockAnswer | ToolUseBlockAnswer]
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ]
    stop_sequence: str | None
    usage: MessagesUsage
    receipt: dict[str, Any] | None = None


class TokenCountAnswer(BaseModel):
    input_tokens: int
