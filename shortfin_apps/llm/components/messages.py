"""What crosses the border between the HTTP loop and the engine's thread."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from shortfin_apps.llm.components.entry_counts import EntryCounts, PlanCounts
from shortfin_apps.llm.components.kvcache.base import CacheUsage
from shortfin_apps.llm.components.sampling_params import SamplingParams
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since start, and gauges of this moment. Seconds are wall time of the engine's thread."""

    num_waiting: int
    num_running: int
    pages: CacheUsage
    steps: int
    plans: PlanCounts  # what it took to lay out block tables
    prompt_tokens: int  # computed, without those found in the cache
    cached_tokens: int  # found in the cache, counted once at admission
    generation_tokens: int
    preemptions: int
    entries: Mapping[str, EntryCounts]  # by name, those that ran
    step_s: float  # total time inside steps
    device_s: float  # of that, between submit and the results' arrival
    failures_in_a_row: int = 0  # invocations that failed since the last one that did not

    @property
    def padded_tokens(self) -> int:
        """Rows computed for nobody."""
        return sum(counts.padded_tokens for counts in self.entries.values())


class EngineClient(Protocol):
    """What the HTTP side sees of the engine; `components/async_engine.py` implements it.

    Every method is called from the event loop's thread and returns at once.
    """

    def submit(self, call: GenerateCall) -> AsyncGenerator[Delta, None]:
        """Admits the request now and returns its stream; closing the stream early aborts it.

        Python does not tell a generator that was never started of its end: `abort` its request, too.

        Raises OverloadedError, UnavailableError or InvalidRequestError before anything is queued, and
        RequestAbortedError for what resumes when the time of draining is over.
        The last Delta carries `finish_reason`; with ERROR it carries `error` too.
        """
        ...

    def abort(self, request_id: str) -> bool:
        """Ends a request; its stream then yields a last Delta with ABORT. False when unknown."""
        ...

    def abort_all(self) -> int:
        """Aborts every request and says how many there were."""
        ...

    def flush_cache(self) -> None:
        """Forgets all cached pages that no request uses, before any request submitted from now on starts."""
        ...

    def stats(self) -> EngineStats: ...

    @property
    def max_requests(self) -> int:
        """The most requests admitted and not yet answered."""
        ...

    @property
    def max_queue_tokens(self) -> int:
        """The most prompt tokens admitted and without a first token yet; one request may have more."""
        ...

    @property
    def max_request_tokens(self) -> int:
        """The most tokens, prompt and output together, that any request can ever have here."""
        ...

    @property
    def ready(self) -> bool:
        """Loaded, warmed up, and neither draining nor stalled."""
        ...

    @property
    def healthy(self) -> bool:
        """The engine's thread lives, its device works, and if it has work, a step ended lately."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Admits nothing more; returns when all requests ended, aborting the rest at the timeout."""
        ...
