"""Messages between the HTTP event loop and the engine's thread: calls one way, deltas the other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.contract.errors import InvalidRequestError, LlmError

MAX_PRIORITY = 100
MAX_TENANT_LENGTH = 256


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-sequence or a stop token
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Terms of service of a request.

    Within a tenant, requests with lower `priority` come first (as in vLLM); tenants share the service by
    tokens. `timeout_s` counts from admission; None is no limit.
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
    """One prompt to continue. `prompt_token_ids` have been checked against the vocabulary.

    `resumes` marks the next step of something admitted before (a beam search): it is not refused when the
    queue is full or while draining, and runs before new requests, like a preempted one.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    cache_salt: str | None = None
    resumes: bool = False
    terms: Terms = DEFAULT_TERMS
    is_traced: bool = False  # whether its deltas report when its tasks were computed


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one generated token under the model's own distribution (temperature 1).

    `rank` is its rank among all tokens by likelihood, from 1.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]  # (token ID, logprob), best first
    rank: int


class ChosenLogit(NamedTuple):
    """The f32 logit of a generated token, before adjustments and temperature.

    `entry_family` is the family of the entry that computed its row.
    """

    logit: float
    entry_family: str


class ComputedTask(NamedTuple):
    """Timing of a traced request's task: from planning its invocation to committing its rows.

    Times are seconds of the engine's clock, `time.perf_counter`; on Linux all processes share this clock, and
    it equals `time.monotonic`. `device_before_s` and `device_after_s` are the engine's total wait for the
    device at the start and end.
    """

    began_s: float
    ended_s: float
    device_before_s: float
    device_after_s: float
    start_position: int
    num_tokens: int
    entry_family: str
    batch_tasks: int  # tasks in the invocation, including this one


class Delta(NamedTuple):
    """Output that one step added to one request; `finish_reason` is set on the last delta only.

    `token_ids` include the token that ends a sequence (end-of-sequence or stop token). `logits` has one entry
    per token if the request asked for them, else none. `error` is the reason for an ERROR, and for an ABORT
    that the client did not request.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0
    queue_s: float = 0.0  # between admission and the first step that worked on it
    computed: tuple[ComputedTask, ...] = ()  # since the last delta, if traced; not all decodes
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token that ended it, None for end-of-sequence
    error: LlmError | None = None
    logits: tuple[ChosenLogit, ...] = ()
