"""Server settings: limits of requests, and how requests are read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode

from shortfin_apps.llm.serving.api.limits import Limits
from shortfin_apps.llm.serving.dialects.choose import ReasoningParser, ToolParser
from shortfin_apps.llm.serving.frontend.async_engine import MAX_QUEUE_TOKENS

DEFAULT_LIMITS = Limits()


class RequestSettings(BaseSettings):
    """Limits and defaults of requests, and tenants' shares."""

    max_queue: int = Field(256, ge=1, description="maximum waiting requests; further ones get 429")
    max_body_bytes: int = Field(
        DEFAULT_LIMITS.body_bytes,
        ge=1,
        description="largest body of a request in bytes; larger ones are answered 413",
    )
    strict_fields: bool = Field(
        False, description="refuse requests that have unknown fields, instead of ignoring the fields"
    )
    special_in_content: bool = Field(
        True, description="turn names of special tokens in messages into those tokens, instead of plain text"
    )
    tool_parser: ToolParser = Field(
        "auto", description="format of tool calls; auto: detected from the chat template"
    )
    reasoning_parser: ReasoningParser = Field(
        "auto", description="format of reasoning; auto: detected from the chat template"
    )
    stored_responses: int = Field(
        1000,
        ge=0,
        description="most responses of /v1/responses to store for `previous_response_id`, in memory, 64 MiB "
        "at most; 0, or several API processes: none",
    )
    max_queue_tokens: int = Field(
        MAX_QUEUE_TOKENS,
        ge=1,
        description="most prompt tokens of requests without a first token; further requests are answered 429",
    )
    request_timeout: float | None = Field(
        None, gt=0, description="seconds for a request, queueing included (default: no limit)"
    )
    tenant_weights: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="tenants' shares of the service, as NAME=WEIGHT; others have weight 1"
    )
    default_temperature: float | None = Field(
        None, ge=0, le=100, description="temperature of requests that set none (default: the model's)"
    )

    receipts: bool = Field(
        False,
        description="add a replayable receipt to every answer (docs/determinism.md)",
    )
    receipt_key: Path | None = Field(
        None, description="private Ed25519 key (PEM) that signs receipts, as `openssl genpkey` makes it"
    )

    @field_validator("tenant_weights")
    @classmethod
    def _check_weights(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            name, _, weight = entry.rpartition("=")
            is_number = re.fullmatch(r"\d+(\.\d+)?", weight) is not None
            # Outside this range, one tenant's service is lost in the rounding error of another's.
            if not name or not is_number or not 0.001 <= float(weight) <= 1000:
                raise ValueError(f"{entry!r} must be a tenant's name, `=` and a number from 0.001 to 1000")
        return value
