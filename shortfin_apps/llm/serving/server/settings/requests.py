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
CONVERSATION_TOKENS = 1 << 22  # four bytes each


class RequestSettings(BaseSettings):
    """Limits and defaults of requests, and tenants' shares."""

    max_queue: int = Field(256, ge=1, description="maximum waiting requests; further ones get 429")
    max_body_bytes: int = Field(
        DEFAULT_LIMITS.body_bytes,
        ge=1,
        description="largest body of a request in bytes; larger ones are answered 413",
    )
    max_json_depth: int = Field(
        DEFAULT_LIMITS.json_depth, ge=1, description="deepest nesting of arrays and objects in a body"
    )
    max_prompts: int = Field(DEFAULT_LIMITS.prompts, ge=1, description="most prompts in one request")
    max_prompt_chars: int = Field(
        DEFAULT_LIMITS.prompt_chars, ge=1, description="most characters of one prompt or conversation"
    )
    max_n: int = Field(DEFAULT_LIMITS.n, ge=1, description="most choices for one prompt")
    max_stops: int = Field(DEFAULT_LIMITS.stops, ge=0, description="most stop strings of one request")
    max_stop_chars: int = Field(
        DEFAULT_LIMITS.stop_chars, ge=1, description="most characters of one stop string"
    )
    max_logprobs: int = Field(
        DEFAULT_LIMITS.logprobs,
        ge=0,
        le=DEFAULT_LIMITS.logprobs,
        description="most alternatives reported for a token",
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
    conversation_tokens: int = Field(
        CONVERSATION_TOKENS,
        ge=0,
        description="tokens of finished chats to remember, so that a chat goes on behind the tokens that "
        "were generated, which are cached; 0 tokenises every chat anew",
    )
    stored_responses: int = Field(
        1000,
        ge=0,
        description="most responses of /v1/responses to store for `previous_response_id`, in memory, 64 MiB "
        "at most; 0, or several API processes: none",
    )
    stored_responses_ttl: float = Field(3600.0, gt=0, description="seconds for which a response is stored")
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
    num_beams: int = Field(
        1, ge=1, description="beams of /generate requests that set none; 1 is no beam search"
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
