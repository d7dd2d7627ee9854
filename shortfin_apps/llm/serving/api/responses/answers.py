"""Schemas of the answers of `/v1/responses`, for the OpenAPI document; see `serving/api/answers.py`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

ItemStatus = Literal["completed", "incomplete"]


class OutputText(BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[dict[str, Any]]


class ReasoningText(BaseModel):
    type: Literal["reasoning_text"]
    text: str


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(BaseModel):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[dict[str, Any]]
    content: list[ReasoningText]


class OutputCall(BaseModel):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseAnswer(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete"]
    background: Literal[False]
    error: None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    usage: ResponseUsage
    store: bool
    previous_response_id: str | None
    instructions: str | None
    metadata: dict[str, str]
    max_output_tokens: int | None
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    temperature: float
    top_p: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    truncation: Literal["disabled"]
    user: str | None
    receipt: dict[str, Any] | None = None


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(BaseModel):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
