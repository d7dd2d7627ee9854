"""The engine: plan -> run -> commit.

One thread calls `step` again and again. Between two steps nothing is in flight, so whatever is added,
aborted or released there takes effect at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.batching.scheduler import Scheduler
from shortfin_apps.llm.components.engine.stats import EngineStats
from shortfin_apps.llm.components.invocation.invocation import BatchResult, BatchRunner
from shortfin_apps.llm.components.kvcache.base import KVCache
from shortfin_apps.llm.components.request.messages import Delta, FinishReason, GenerateCall, TokenLogprobs
from shortfin_apps.llm.components.request.request import IllegalTransitionError, Request
from shortfin_apps.llm.components.sampling.sampling import (
    Candidates,
    banned_tokens,
    choose,
    logprobs_of,
    needs_logits,
)
from shortfin_apps.llm.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    InvocationError,
    LlmError,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What of a model the engine must know to check a request and to end one."""

    max_seq_len: int
    eos_token_ids: frozenset[int]


class Engine:
    """With `strict`, a request that leaves the lifecycle table raises; otherwise it alone is ended."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        cache: KVCache,
        runner: BatchRunner,
        limits: ModelLimits,
        strict: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._runner = runner
        self._limits = limits
        self._strict = strict
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._deadlines_s: dict[str, float] = {}
        self._deltas: list[Delta] = []  # of the step under way
        self._num_steps = 0
        self._failures_in_a_row = 0
        self._num_tasks = 0
        self._step_s = 0.0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generation_tokens = 0

    @property
    def max_request_tokens(self) -> int:
        """The most tokens of prompt and output together: the context, or the whole pool if smaller."""
        return min(self._limits.max_seq_len, self._cache.usage().total * self._cache.stride)

    def check(self, call: GenerateCall) -> None:
        """Raises InvalidRequestError for a request that can never be served. Safe on any thread."""
        total = len(call.prompt_ids) + call.params.max_tokens
        if not call.prompt_ids:
            raise InvalidRequestError("the prompt is empty: at least one token is needed", "prompt")
        if total > self._limits.max_seq_len:
            raise InvalidRequestError(
                f"the prompt has {len(call.prompt_ids)} tokens and max_tokens is {call.params.max_tokens}: "
                f"together more than the model's context of {self._limits.max_seq_len}",
                "max_tokens",
            )
        if total > self.max_request_tokens:
            raise InvalidRequestError(
                f"{total} tokens of prompt and output do not fit the server's KV cache, which holds "
                f"{self.max_request_tokens}; "
                "start it with more --pages",
                "max_tokens",
            )
        if call.params.logprobs is not None and not self._runner.returns_logits:
            raise InvalidRequestError("this model was compiled without logits, so no `logprobs`", "logprobs")

    def add(self, call: GenerateCall) -> None:
        request = Request(call, arrival_s=self._clock())
        self._requests[call.request_id] = request
        if call.terms.timeout_s is not None:
            self._deadlines_s[call.request_id] = request.arrival_s + call.terms.timeout_s
        self._scheduler.add(request)

    def abort(self, request_id: str, error: LlmError | None = None) -> Delta | None:
        """Ends a request now, `error` saying why; None when it is not (or no longer) here."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        return self._finish(request, FinishReason.ABORT, error=error)

    def flush_cache(self) -> None:
        """Frees every page that is only kept for its prefix."""
        self._cache.flush()

    def fail_all(self, error: LlmError) -> list[Delta]:
        """Ends everything, in whatever state it is, and hands over what a step had not; for a bug in it."""
        requests = list(self._requests.values())
        self._requests.clear()
        self._deadlines_s.clear()
        for request in requests:
            _distrust(request)
            self._scheduler.discard(request)
        reason = FinishReason.ERROR
        ended = [Delta(request_id=r.request_id, finish_reason=reason, error=error) for r in requests]
        return self._take_deltas() + ended

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def step(self) -> list[Delta]:
        """Ends what is late, and one invocation's worth of progress: what it added to each request."""
        began_s = self._clock()
        self._expire(began_s)
        try:
            batch = self._scheduler.plan()
        except IllegalTransitionError as bug:
            self._contain(bug)
        else:
            if batch is not None:
                self._invoke(batch, began_s)
        return self._take_deltas()

    def stats(self) -> EngineStats:
        return EngineStats(
            num_waiting=len(self._scheduler.waiting),
            num_running=len(self._scheduler.running),
            pages=self._cache.usage(),
            steps=self._num_steps,
            plans=self._runner.plan_counts,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generation_tokens=self._generation_tokens,
            preemptions=self._scheduler.num_preemptions,
            entries=self._runner.counts(),
            step_s=self._step_s,
            device_s=self._runner.device_s,
            failures_in_a_row=self._failures_in_a_row,
        )

    def _take_deltas(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _expire(self, now_s: float) -> None:
        """Ends the requests whose time is over, wherever they are."""
        if not self._deadlines_s:
            return
        late = [request_id for request_id, deadline_s in self._deadlines_s.items() if deadline_s <= now_s]
        for request in map(self._requests.__getitem__, late):
            error = DeadlineExceededError("the request's time (`timeout_s` or the server's limit) is over")
            self._deltas.append(self._finish(request, FinishReason.ABORT, error=error))

    def _invoke(self, batch: Batch, began_s: float) -> None:
        try:
            self._clear_suspects()
            rows = self._rows(batch, self._runner.run(batch))
        except Exception as error:
            self._failures_in_a_row += 1
            self._fail(batch, error)
            return
        self._failures_in_a_row = 0
        self._commit(batch, rows, began_s)
        self._num_steps += 1
        self._step_s += self._clock() - began_s

    def _clear_suspects(self) -> None:
        """Before anybody computes into pages, or beside pages, that may hold NaN of somebody else."""
        if self._cache.suspects:
            self._runner.clear_pages(self._cache.suspects)
            self._cache.suspects.clear()

    def _rows(self, batch: Batch, result: BatchResult) -> list[Candidates | None]:
        """What came out for each task; None where that is not worth fetching.

        Nothing is asked of the device after this, so that its failure is still the whole invocation's.
        """
        return [self._row(task, result, index) for index, task in enumerate(batch.tasks)]

    def _row(self, task: LlmTaskInput, result: BatchResult, index: int) -> Candidates | None:
        num_candidates = self._runner.num_candidates
        if not task.completes:
            return result.row(index, with_logits=False) if num_candidates else None
        banned = banned_tokens(task.request, self._limits.eos_token_ids)
        wide = needs_logits(task.request.call.params, len(banned), num_candidates)
        return result.row(index, with_logits=wide and self._runner.returns_logits)

    def _commit(self, batch: Batch, rows: Sequence[Candidates | None], began_s: float) -> None:
        """Takes over what was computed; what is not a number ends its request and gets to no one else."""
        for task, row in zip(batch.tasks, rows, strict=True):
            if row is not None and not np.isfinite(row.best):
                self._retract(task.request)
                error = InvocationError("the model returned logits that are not finite numbers")
                self._deltas.append(self._finish(task.request, FinishReason.ERROR, error=error))
                continue
            self._advance(task, began_s)
            if row is None:
                _distrust(task.request)
            else:
                self._publish(task)
            if task.completes:
                assert row is not None
                self._deltas.append(self._sample(task.request, row))

    def _retract(self, request: Request) -> None:
        """Has what it wrote cleared, and what it shared forgotten: one of these pages has NaN."""
        _distrust(request)
        assert request.lease is not None
        self._cache.retract(request.lease)

    def _advance(self, task: LlmTaskInput, began_s: float) -> None:
        """Counts the task's tokens as computed."""
        request = task.request
        if request.num_generated == 0:
            self._prompt_tokens += len(task.input_tokens)
        if request.last_turn < 0:
            self._cached_tokens += request.num_cached
            request.queue_s = began_s - request.arrival_s
        self._num_tasks += 1
        request.last_turn = self._num_tasks
        request.num_computed = task.seq_len

    def _publish(self, task: LlmTaskInput) -> None:
        """Offers for sharing the pages that it filled, and those of earlier tasks that were not yet."""
        request, stride = task.request, self._cache.stride
        assert request.lease is not None
        request.lease.is_suspect = False  # the row attended to all of its pages
        if len(task.input_tokens) > 1 or task.seq_len // stride > task.start_position // stride:
            self._cache.publish(request.lease, request.tokens, task.seq_len)

    def _sample(self, request: Request, row: Candidates) -> Delta:
        """Appends the next token to the request, ending it when that was the last."""
        params = request.call.params
        try:
            token = choose(row, request, banned_tokens(request, self._limits.eos_token_ids))
        except InvocationError as error:
            return self._finish(request, FinishReason.ERROR, error=error)
        logprobs: tuple[TokenLogprobs, ...] = ()
        if params.logprobs is not None and row.logits is not None:
            logprobs = (logprobs_of(row.logits, token, params.logprobs),)
        request.tokens.append(token)
        self._generation_tokens += 1
        self._scheduler.charge(request, 1)
        return self._delta_of(request, token, logprobs)

    def _delta_of(self, request: Request, token: int, logprobs: tuple[TokenLogprobs, ...]) -> Delta:
        params = request.call.params
        is_eos = token in self._limits.eos_token_ids and not params.ignore_eos
        if is_eos or token in params.stop_token_ids:
            stop = None if is_eos else token
            return self._finish(request, FinishReason.STOP, (token,), logprobs, stop)
        if request.num_generated >= params.max_tokens:
            return self._finish(request, FinishReason.LENGTH, (token,), logprobs)
        return Delta(
            request_id=request.request_id,
            token_ids=(token,),
            logprobs=logprobs,
            num_cached_tokens=request.num_cached,
            queue_s=request.queue_s,
        )

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        stop_token_id: int | None = None,
        error: LlmError | None = None,
    ) -> Delta:
        """The one way out: pages back, forgotten, last delta."""
        try:
            self._scheduler.finish(request, reason)
        except IllegalTransitionError as bug:
            reason, error = FinishReason.ERROR, self._discard(bug)
        self._forget(request)
        return Delta(
            request_id=request.request_id,
            token_ids=token_ids,
            logprobs=logprobs,
            num_cached_tokens=request.num_cached,
            queue_s=request.queue_s,
            finish_reason=reason,
            stop_token_id=stop_token_id,
            error=error,
        )

    def _fail(self, batch: Batch, error: Exception) -> None:
        """An invocation that failed ends the requests in it and nobody else."""
        logger.error("invocation of %d tasks failed", len(batch.tasks), exc_info=error)
        shown = error if isinstance(error, LlmError) else InvocationError(f"the invocation failed: {error}")
        for task in batch.tasks:
            _distrust(task.request)
            self._deltas.append(self._finish(task.request, FinishReason.ERROR, error=shown))

    def _contain(self, bug: IllegalTransitionError) -> None:
        """Ends the one request that is out of step; nothing when it was answered before."""
        request, error = bug.request, self._discard(bug)
        if self._requests.get(request.request_id) is not request:
            return
        self._forget(request)
        ended = Delta(request_id=request.request_id, finish_reason=FinishReason.ERROR, error=error)
        self._deltas.append(ended)

    def _forget(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._deadlines_s.pop(request.request_id, None)

    def _discard(self, bug: IllegalTransitionError) -> LlmError:
        """Takes a request out of step back from everywhere. Raises the bug if `strict`."""
        if self._strict:
            raise bug
        logger.error("a request left its lifecycle and is ended; please report this bug", exc_info=bug)
        self._scheduler.discard(bug.request)
        return InvocationError("the engine lost track of this request and ended it")


def _distrust(request: Request) -> None:
    """Has the pages that it writes cleared before anybody else gets them."""
    if request.lease is not None:
        request.lease.is_suspect = True
