"""What crosses the border between the HTTP loop and the engine's thread."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.errors import InvalidRequestError, LlmError

MAX_PRIORITY = 100
MAX_TENANT_LENGTH = 256


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-sequence or a stop token
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """On what terms a request is served.

    Of one tenant's requests, those of lower `priority` come first (as vLLM has it); tenants share by
    tokens. `timeout_s` is counted from admission; None waits as long as it takes.
    """

    priority: int = 0
    tenant: str = ""
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if abs(self.priority) > MAX_PRIORITY:
            rule = f"`priority` must lie in [-{MAX_PRIORITY}, {MAX_PRIORITY}]; lower comes first"
            raise InvalidRequestError(rule, "priority")
        if len(self.tenant) > MAX_TENANT_LENGTH:
            raise InvalidRequestError(f"`user` must have at most {MAX_TENANT_LENGTH} characters", "user")
        if self.timeout_s is not None and not 0 <= self.timeout_s < math.inf:
            raise InvalidRequestError("`timeout_s` must be a number of seconds, 0 or more", "timeout_s")


DEFAULT_TERMS = Terms()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """One prompt to continue. `prompt_ids` are checked against the vocabulary before they get here.

    `resumes` marks the next step of something admitted before (a beam search): it is refused neither
    for want of a place nor while draining, and goes before newcomers, as a preempted request does.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    cache_salt: str | None = None
    resumes: bool = False
    terms: Terms = DEFAULT_TERMS


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one generated token under the model's own distribution (temperature 1)."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), best first


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one step added to one request; `finish_reason` is set on the last one only.

    The token that ends a sequence (end-of-sequence or stop token) is among `token_ids`. `error` says why
    it ended with ERROR, or with an ABORT that nobody asked for.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0
    queue_s: float = 0.0  # between admission and the first step that worked on it
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token that ended it, None for end-of-sequence
    error: LlmError | None = None
