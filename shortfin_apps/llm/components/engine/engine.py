"""The engine: plan, run, commit.

One thread calls `step` repeatedly. Between two steps, at most one decode step is in flight, queued ahead
(decode_ahead.py). If requests are added or aborted or pages released between steps, this takes effect
immediately, or after the step in flight.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.batching.scheduler import Scheduler
from shortfin_apps.llm.components.engine.active_requests import ActiveRequests
from shortfin_apps.llm.components.engine.decode_ahead import DecodeAhead, decode_batch
from shortfin_apps.llm.components.engine.draft_model import DraftModel
from shortfin_apps.llm.components.engine.mask_costs import MaskCosts
from shortfin_apps.llm.components.engine.row_reader import RowReader, Rows
from shortfin_apps.llm.components.engine.snapshot import Snapshot, take_snapshot
from shortfin_apps.llm.components.engine.speculation import Speculation
from shortfin_apps.llm.components.engine.stats import EngineCounters, EngineStats
from shortfin_apps.llm.components.engine.steady_decode import SteadyDecode
from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.invocation.tuning import tokens_beside_decodes, tokens_within_gap
from shortfin_apps.llm.components.kvcache.cache import KVCache
from shortfin_apps.llm.components.kvcache.lease import Lease
from shortfin_apps.llm.components.recorder.flight_recorder import FlightRecorder
from shortfin_apps.llm.components.request.messages import (
    ChosenLogit,
    ComputedTask,
    Delta,
    FinishReason,
    GenerateCall,
    TokenLogprobs,
)
from shortfin_apps.llm.components.request.request import IllegalTransitionError, Request, State
from shortfin_apps.llm.components.sampling.candidates import Candidates, Drawn
from shortfin_apps.llm.components.sampling.draw import NOT_FINITE
from shortfin_apps.llm.components.sampling.sampler import Sampler, logprobs_of
from shortfin_apps.llm.components.speculation.draft import SpeculationOptions
from shortfin_apps.llm.contract.abi import EntryFamily
from shortfin_apps.llm.contract.errors import (
    ConstraintError,
    DeadlineExceededError,
    DeviceLostError,
    InvalidRequestError,
    InvocationError,
    LlmError,
)

logger = logging.getLogger(__name__)


class Engine:
    """Executes requests on one model, one batch of tasks per step.

    If a request makes an illegal lifecycle transition, `strict` engines raise; others end only that request.
    `decode_ahead` enables the VMFB's decode loops (entries that decode and sample on the device), and
    `speculation` enables proposed tokens.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        cache: KVCache,
        runner: BatchRunner,
        max_seq_len: int,
        eos_token_ids: frozenset[int],
        strict: bool = False,
        decode_ahead: bool = True,
        speculation: SpeculationOptions | None = None,
        draft_model: DraftModel | None = None,
        recorder: FlightRecorder | None = None,
        mask_costs: MaskCosts | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._recorder = recorder
        self._scheduler = scheduler
        self._cache = cache
        self._runner = runner
        self._max_seq_len = max_seq_len
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._sampler = Sampler(
            eos_token_ids,
            num_candidates=runner.num_candidates,
            returns_logits=runner.returns_logits,
            draws_rows=runner.buckets.draws_rows,
            adjusts_rows=runner.buckets.draws_adjusted_rows,
        )
        self._reader = RowReader(runner, self._sampler)
        self._speculation = None
        if speculation is not None:
            self._speculation = Speculation(scheduler, speculation, draft_model)
        self._ahead = DecodeAhead(runner, scheduler, self._sampler, cache, self._speculation)
        self._uses_loops = decode_ahead and runner.buckets.has_decode_loops
        self._requests = ActiveRequests(scheduler, strict=strict)
        self._counters = EngineCounters()
        self._mask_costs = mask_costs or MaskCosts()
        self._steady: SteadyDecode | None = None
        self._deltas: list[Delta] = []  # of the current step
        self._device_before_s = 0.0  # device seconds before the current step
        self._commit_s: float | None = None  # time when the current commit began, if a trace needs it

    @property
    def max_running(self) -> int:
        """Maximum number of concurrently running requests."""
        return self._scheduler.max_running

    @property
    def max_request_tokens(self) -> int:
        """Maximum prompt plus output tokens: the context length, or the page pool's capacity if smaller."""
        return min(self._max_seq_len, self._cache.usage().total * self._cache.stride)

    @property
    def returns_logits(self) -> bool:
        """Whether the VMFB returns full rows of logits, which penalties need."""
        return self._runner.returns_logits

    def tune(self, *, on_gpu: bool) -> None:
        """Measure how many prompt tokens to compute per step while requests decode.

        Callers must call this before the first step. On CPUs, sets the token budget under light load. On
        GPUs, sets the token budget under any load, but only for modes that mix prompts and decodes in one
        invocation.
        """
        mode = self._scheduler.mode
        if (budget := mode.budget) is None or (on_gpu and not mode.mixes):
            return
        if on_gpu:
            tokens = tokens_within_gap(self._runner, budget.while_decoding, budget.most)
            budget.while_decoding = tokens or budget.while_decoding
        else:
            budget.least = tokens_beside_decodes(self._runner, budget.most, self._clock) or budget.least

    def check(self, call: GenerateCall) -> None:
        """Raise InvalidRequestError for a request that can never be served. Thread-safe."""
        num_prompt, max_tokens = len(call.prompt_token_ids), call.params.max_tokens
        if not num_prompt:
            raise InvalidRequestError("the prompt is empty: at least one token is needed", "prompt")
        if num_prompt + max_tokens > self._max_seq_len:
            raise InvalidRequestError(
                f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}: "
                f"together more than the model's context of {self._max_seq_len}",
                "max_tokens",
            )
        if num_prompt + max_tokens > self.max_request_tokens:
            raise InvalidRequestError(
                f"{num_prompt + max_tokens} tokens of prompt and output do not fit the server's KV cache, "
                f"which holds {self.max_request_tokens}; start it with more --pages",
                "max_tokens",
            )
        self._sampler.check(call.params)

    def add(self, call: GenerateCall) -> None:
        request = Request(call, arrival_s=self._clock())
        self._mask_costs.watch(request)
        self._requests.add(request)

    def abort(self, request_id: str, error: LlmError | None = None) -> Delta | None:
        """End a request now and return its last delta; None if the request is unknown or already finished.

        `error` is the reason reported to the client.
        """
        request = self._requests.get(request_id)
        return None if request is None else self._requests.end(request, FinishReason.ABORT, error)

    def preempt(self, request_id: str) -> bool:
        """Preempt a request as if pages had run out, to test that preemption does not change its output.

        Returns False if the request is not running or a step is in flight.
        """
        request = self._requests.get(request_id)
        if request is None or request.state is not State.RUNNING or self._ahead.in_flight:
            return False
        self._scheduler.preempt(request)
        return True

    def flush_cache(self) -> None:
        """Free all pages that are cached for prefix sharing but not leased."""
        self._cache.flush()
        if self._speculation is not None:
            self._speculation.flush_cache()

    def count_self_test(self, failure: str | None) -> None:
        """Count a self-test of the program; `failure` describes the mismatch, or is None if it passed."""
        self._counters.self_tests += 1
        self._counters.self_test_failures += failure is not None
        self._counters.failed_self_test = failure

    def fail_all(self, error: LlmError) -> list[Delta]:
        """End every request after a bug in `step`.

        Returns the deltas of the interrupted step, followed by the last delta of each request.
        """
        self._ahead.abandon()
        self._fault("the engine failed outside an invocation")
        ended = self._requests.discard_all(error)
        return self._take_deltas() + ended

    @property
    def has_work(self) -> bool:
        """Whether `step` must be called: requests remain, or a step is in flight."""
        return len(self._requests) > 0 or self._ahead.in_flight

    def step(self) -> list[Delta]:
        """End requests past their deadline, then plan, run and commit one invocation.

        Returns the deltas of all affected requests.
        """
        began_s, membership = self._clock(), self._scheduler.membership
        self._device_before_s, self._commit_s = self._runner.device_s, None
        self._end_late(began_s)
        if self._steady is not None and self._steady.holds and not self._would_propose(self._steady.requests):
            self._go_on(self._steady, began_s)
        else:
            self._steady = None
            self._plan_and_run(began_s)
        if self._steady is None and self._ahead.in_flight and membership == self._scheduler.membership:
            self._steady = self._steady_decode()
        deltas = self._take_deltas()
        if self._recorder is not None:
            self._note_turn(self._recorder, began_s, deltas)
        return deltas

    def stats(self) -> EngineStats:
        return EngineStats(
            **vars(self._counters),
            page_tokens=self._cache.stride,
            shares_prefixes=self._cache.shares_prefixes,
            num_waiting=len(self._scheduler.waiting),
            num_running=len(self._scheduler.running),
            num_waiting_tenants=self._scheduler.waiting.num_tenants,
            pages=self._cache.usage(),
            window_pages=self._cache.window_usage(),
            plans=self._runner.plan_counts,
            preemptions=self._scheduler.num_preemptions,
            entries=self._runner.counts(),
            device_s=self._runner.device_s,
            uploads=self._runner.num_uploads,
            steps_ahead=self._ahead.queued,
            discarded_tokens=self._ahead.discarded,
            speculation=None if self._speculation is None else replace(self._speculation.counts),
        )

    def _note_turn(self, recorder: FlightRecorder, began_s: float, deltas: Sequence[Delta]) -> None:
        recorder.turn(
            began_s,
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_preemptions=self._scheduler.num_preemptions,
            ended=[(d.request_id, d.finish_reason.value) for d in deltas if d.finish_reason is not None],
        )

    def _fault(self, reason: str) -> None:
        """Report a failure to the flight recorder, if there is one; it dumps its records to a file."""
        if self._recorder is not None:
            self._recorder.on_fault(reason)

    def snapshot(self, at_s: float) -> Snapshot:
        """Take a snapshot of requests and pages, between steps; `at_s` is the time on the caller's clock."""
        return take_snapshot(self._scheduler, self._cache, self.stats(), at_s=at_s, now_s=self._clock())

    def _plan_and_run(self, began_s: float) -> None:
        batch = self._plan()
        rows = None if batch is None else self._run(batch)
        if batch is not None and rows is not None:
            self._commit(batch, rows, began_s)
            self._counters.count_step(self._clock() - began_s)
        if self._speculation is not None:
            self._speculation.settle()
        self._end_costly()

    def _would_propose(self, requests: Sequence[Request]) -> bool:
        return self._speculation is not None and self._speculation.would_propose(requests)

    def _steady_decode(self) -> SteadyDecode:
        """Create a steady decode of the requests in flight; all must still run after the previous step."""
        return SteadyDecode(
            self._ahead.requests, self._scheduler, self._cache, self._counters, self._eos_token_ids
        )

    def _go_on(self, steady: SteadyDecode, began_s: float) -> None:
        """Run one step of a steady decode; commit by the general path if a request may end."""
        try:
            token_ids = self._ahead.go_on()
        except Exception as error:
            self._fail(decode_batch(steady.requests), error)
            return
        self._counters.consecutive_failures = 0
        if steady.may_end(token_ids):
            self._steady = None
            self._commit(decode_batch(steady.requests), list(map(Drawn, token_ids)), began_s)
        else:
            self._deltas += steady.commit(token_ids)
        self._counters.count_step(self._clock() - began_s)

    def _take_deltas(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _end_late(self, now_s: float) -> None:
        for request in self._requests.late(now_s):
            error = DeadlineExceededError("the request's time (`timeout_s` or the server's limit) is over")
            self._deltas.append(self._requests.end(request, FinishReason.ABORT, error))

    def _end_costly(self) -> None:
        """End the requests with grammars that take so long in each step that other requests slow down."""
        for request_id, error in self._mask_costs.settle():
            if (request := self._requests.get(request_id)) is not None:
                self._deltas.append(self._requests.end(request, FinishReason.ERROR, error))

    def _plan(self) -> Batch | None:
        """Return the batch in flight or the next one; None if no batch is due, or after a bug in planning."""
        if (queued := self._ahead.batch()) is not None:
            return queued
        try:
            batch = self._scheduler.plan()
        except IllegalTransitionError as bug:
            if (ended := self._requests.contain(bug)) is not None:
                self._deltas.append(ended)
            return None
        return batch if batch is None or self._speculation is None else self._speculation.added_to(batch)

    def _run(self, batch: Batch) -> Rows | None:
        """Run one invocation and return its rows; on failure, end the requests of the batch and return None.

        All rows are fetched here. The commit makes no access to the device and so cannot fail halfway.
        """
        try:
            rows = self._compute(batch)
        except Exception as error:
            self._fail(batch, error)
            return None
        self._counters.consecutive_failures = 0
        return rows

    def _compute(self, batch: Batch) -> Rows:
        if not self._ahead.in_flight:
            self._runner.clear_suspects(self._cache)
        if self._uses_loops and (drawn := self._ahead.run(batch)) is not None:
            return drawn
        result = self._runner.run(batch, meanwhile=lambda: self._reader.prepare(batch))
        return self._reader.rows(batch, result)

    def _fail(self, batch: Batch, error: Exception) -> None:
        """Abandon the step in flight, and end the requests of the batch."""
        self._ahead.abandon(waits=not isinstance(error, DeviceLostError))
        was_lost = self._counters.lost_device is not None
        logger.error(
            "invocation of %d tasks failed: %s", len(batch.tasks), error, exc_info=None if was_lost else error
        )
        self._counters.failed_invocations += 1
        self._counters.consecutive_failures += 1
        if isinstance(error, DeviceLostError):
            self._counters.lost_device = str(error)
        self._fault(f"an invocation failed: {error}")
        shown = error if isinstance(error, LlmError) else InvocationError(f"the invocation failed: {error}")
        for request in dict.fromkeys(task.request for task in batch.tasks):
            request.suspect_pages()
            self._deltas.append(self._requests.end(request, FinishReason.ERROR, shown))

    def _commit(self, batch: Batch, rows: Rows, began_s: float) -> None:
        """Advance each task, publish full pages and sample tokens; a row with NaN ends its request instead.

        Rows of rejected proposed tokens and of ended requests are dropped.
        """
        for task, row in zip(batch.tasks, rows, strict=True):
            if task.is_stale:
                continue
            lease = task.request.lease
            assert lease is not None, "a running request has pages"
            if row is not None and not row.is_finite:
                task.request.suspect_pages()
                self._cache.retract(lease)
                error = InvocationError(NOT_FINITE)
                self._fault(f"request {task.request.request_id} got a row of NaN at {task.seq_len - 1}")
                self._deltas.append(self._requests.end(task.request, FinishReason.ERROR, error))
                continue
            self._advance(task, began_s)
            if task.request.computed is not None:
                task.request.computed.append(self._computed(task, batch, began_s))
            if row is None:
                task.request.suspect_pages()
                self._cache.give_up(lease, task.seq_len)
                continue
            lease.is_suspect = False  # the row is finite, and attended to all pages of the lease
            self._publish(task, lease)
            if task.completes:
                self._deltas.append(self._sample(task.request, row, batch.family))

    def _advance(self, task: LlmTaskInput, began_s: float) -> None:
        """Mark the task's tokens as computed."""
        request = task.request
        self._counters.count_task(task)
        if request.last_turn < 0:
            request.queue_s = began_s - request.arrival_s
        request.last_turn = self._counters.tasks
        request.num_computed = task.seq_len

    def _computed(self, task: LlmTaskInput, batch: Batch, began_s: float) -> ComputedTask:
        """Return a task's timing in the current step, for a trace; all tasks of a step have the same end."""
        if self._commit_s is None:
            self._commit_s = self._clock()
        return ComputedTask(
            began_s=began_s,
            ended_s=self._commit_s,
            device_before_s=self._device_before_s,
            device_after_s=self._runner.device_s,
            start_position=task.start_position,
            num_tokens=len(task.token_ids),
            entry_family=batch.family.value,
            batch_tasks=len(batch.tasks),
        )

    def _publish(self, task: LlmTaskInput, lease: Lease) -> None:
        """Publish full pages of this task, and of earlier tasks that are not published yet."""
        stride = self._cache.stride
        if len(task.token_ids) > 1 or task.seq_len // stride > task.start_position // stride:
            self._cache.publish(lease, task.request.token_ids, task.seq_len)

    def _sample(self, request: Request, row: Candidates | Drawn, family: EntryFamily) -> Delta:
        """Append the next token to the request, and finish the request if this token is its last.

        `family` is the family of the entry that computed the row.
        """
        params = request.call.params
        try:
            token_id = self._sampler.sample(row, request)
        except (InvocationError, ConstraintError) as error:
            return self._requests.end(request, FinishReason.ERROR, error)
        logprobs: tuple[TokenLogprobs, ...] = ()
        if params.logprobs is not None and isinstance(row, Candidates) and row.logits is not None:
            logprobs = (logprobs_of(row.logits, token_id, params.logprobs),)
        logits: tuple[ChosenLogit, ...] = ()
        if params.chosen_logits:
            logit = row.logit_of(token_id)
            assert logit is not None, "the row has the token's logit where it is asked for"
            logits = (ChosenLogit(logit, family),)
        request.token_ids.append(token_id)
        self._counters.generation_tokens += 1
        self._scheduler.charge(request, 1)
        delta = self._delta(request, token_id, logprobs, logits)
        return delta if delta.finish_reason is None else self._requests.finish(request, delta)

    def _delta(
        self,
        request: Request,
        token_id: int,
        logprobs: tuple[TokenLogprobs, ...],
        logits: tuple[ChosenLogit, ...],
    ) -> Delta:
        reason = self._finish_reason(request, token_id)
        is_stop_token = reason is FinishReason.STOP and not self._is_eos(request, token_id)
        return Delta(
            request_id=request.request_id,
            token_ids=(token_id,),
            logprobs=logprobs,
            logits=logits,
            num_cached_tokens=request.num_cached,
            queue_s=request.queue_s,
            computed=request.take_computed(),
            finish_reason=reason,
            stop_token_id=token_id if is_stop_token else None,
        )

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        """Return the reason for ending the request after this token; None if the request continues."""
        if self._is_eos(request, token_id) or token_id in request.call.params.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if request.num_generated >= request.call.params.max_tokens else None

    def _is_eos(self, request: Request, token_id: int) -> bool:
        return token_id in self._eos_token_ids and not request.call.params.ignore_eos
