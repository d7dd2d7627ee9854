"""Messages between the HTTP event loop, which sends calls, and the engine's thread, which sends deltas."""

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
    """Priority, tenant and timeout of a request.

    Within a tenant, requests with lower `priority` start first (as in vLLM). Among tenants, the scheduler
    balances the number of computed tokens. `timeout_s` counts from admission; None means no limit.
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
    """One prompt to continue. Callers must have checked `prompt_token_ids` against the vocabulary.

    `resumes` marks a further step of a generation that was already admitted (a beam search). Such a call is
    not refused when the queue is full or the server drains, and runs before new requests, like a preempted
    request.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    cache_salt: str | None = None
    resumes: bool = False
    terms: Terms = DEFAULT_TERMS
    is_traced: bool = False  # whether the request's deltas report when its tasks were computed


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one generated token, under the model's unadjusted distribution (temperature 1).

    `logprob` and `rank` are the generated token's; the most likely token has rank 1.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]  # (token ID, logprob), best first
    rank: int


class ChosenLogit(NamedTuple):
    """The f32 logit of a generated token, before adjustments and temperature.

    `entry_family` (prefill, decode, ...) is the kind of the entry that computed the logit.
    """

    logit: float
    entry_family: str


class ComputedTask(NamedTuple):
    """Timing of a traced request's task: from planning its invocation to committing its results.

    Times are seconds of the engine's clock, `time.perf_counter`. On Linux all processes share this clock, and
    it equals `time.monotonic`. `device_before_s` and `device_after_s` are the total time that the engine has
    waited for the device, read at `began_s` and `ended_s`.
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
    """Output that one step added to one request; `finish_reason` is set only on the request's last delta.

    `token_ids` include the token that ends the output (end-of-sequence or stop token). `logits` has one item
    per token if the request asked for logits, else none. `error` is the reason for an ERROR, and for an ABORT
    that the client did not request.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0
    queue_s: float = 0.0  # from admission to the first step that worked on the request
    computed: tuple[ComputedTask, ...] = ()  # tasks since the previous delta, if traced; not all decodes
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token that ended the output; None for end-of-sequence
    error: LlmError | None = None
    logits: tuple[ChosenLogit, ...] = ()
