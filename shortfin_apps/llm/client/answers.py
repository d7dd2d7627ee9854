"""Types of the requests and answers of the OpenAI routes, and parsers for the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from shortfin_apps.llm.client.errors import ServerError

Prompt = str | Sequence[int]
"""Text, or token ids, which are used unchanged."""

Message = Mapping[str, str]
"""One turn of a conversation: `{"role": "system" | "user" | "assistant", "content": ...}`."""


class Sampling(TypedDict, total=False):
    """Sampling parameters and stop conditions; the server has defaults for those left out.

    Beyond OpenAI's own: `top_k` (0: off), `min_p`, `typical_p`, `repetition_penalty`, `bad_words` (strings),
    `allowed_token_ids`, `min_tokens`, `stop_token_ids`, `ignore_eos`,
    `cache_salt` (prompts share cached pages only under the same salt), and `return_token_ids`.
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


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request; `cached_tokens` of the prompt were found in the server's prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """A complete answer. `token_ids` and `usage` are None if the server does not send them."""

    text: str
    finish_reason: str | None
    usage: Usage | None
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed answer. `finish_reason` and `usage` come with the last ones."""

    text: str
    finish_reason: str | None = None
    usage: Usage | None = None
    token_ids: tuple[int, ...] | None = None


def parse_generation(body: Any) -> Generation:
    """Parses a complete answer of either route. Raises ServerError for anything else."""
    try:
        choice = body["choices"][0]
        message = choice.get("message")
        text = choice["text"] if message is None else message["content"]
        reason, token_ids = choice.get("finish_reason"), _token_ids(choice)
        return Generation(text or "", reason, parse_usage(body.get("usage")), token_ids)
    except (LookupError, TypeError, AttributeError) as error:
        raise ServerError(f"the server's answer is not a completion ({error!r})") from error


def parse_chunk(event: Any) -> Chunk:
    """Parses one streamed event of either route. Raises ServerError for anything else."""
    try:
        usage = parse_usage(event.get("usage"))
        if not event["choices"]:
            return Chunk("", usage=usage)
        choice = event["choices"][0]
        delta = choice.get("delta")
        text = choice["text"] if delta is None else delta.get("content")
        return Chunk(text or "", choice.get("finish_reason"), usage, _token_ids(choice))
    except (LookupError, TypeError, AttributeError) as error:
        raise ServerError(f"the server's stream holds no completion chunk ({error!r})") from error


def parse_usage(usage: Any) -> Usage | None:
    """Parses a `usage` object, or null."""
    if usage is None:
        return None
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens") or 0
    return Usage(usage["prompt_tokens"], usage.get("completion_tokens") or 0, cached)


def _token_ids(choice: Any) -> tuple[int, ...] | None:
    token_ids = choice.get("token_ids")
    return None if token_ids is None else tuple(token_ids)
