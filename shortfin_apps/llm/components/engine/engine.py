"""The engine: plan, run, commit.

One thread calls `step` repeatedly. Between two steps, batches may be in flight (pipeline.py). If requests are
added or aborted between steps, this takes effect at once; pages are released after the batches in flight.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.batching.scheduler import Scheduler
from shortfin_apps.llm.components.engine.active_requests import ActiveRequests
from shortfin_apps.llm.components.engine.drafter import Drafter, DraftError
from shortfin_apps.llm.components.engine.mask_costs import MaskCosts
from shortfin_apps.llm.components.engine.pipeline import InFlight, Pipeline
from shortfin_apps.llm.components.engine.row_reader import Row, Rows, is_finite
from shortfin_apps.llm.components.engine.snapshot import Snapshot, take_snapshot
from shortfin_apps.llm.components.engine.speculation import Speculation
from shortfin_apps.llm.components.engine.stats import EngineCounters, EngineStats
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
from shortfin_apps.llm.components.sampling.logprobs import row_logprobs
from shortfin_apps.llm.components.sampling.sampler import Sampler
from shortfin_apps.llm.components.speculation.options import SpeculationOptions
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
    `depth` is how many steps are queued before the tokens of the first are known, if the VMFB has the entries
    for it (`Buckets.can_run_ahead`); `speculation` enables proposed tokens. With `jump_ahead`, tokens that a
    grammar forces are appended without a draw.
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
        depth: int = 1,
        jump_ahead: bool = True,
        speculation: SpeculationOptions | None = None,
        drafter: Drafter | None = None,
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
            computes_logprobs=runner.buckets.computes_logprobs,
        )
        runner.slots.resize(scheduler.max_running)
        depth = depth if runner.num_candidates and runner.buckets.can_run_ahead else 0
        self._pipeline = Pipeline(runner, self._sampler, cache, depth)
        self._jumps_ahead = jump_ahead
        self._speculation = None
        if speculation is not None:
            self._speculation = Speculation(scheduler, speculation, drafter)
        self._requests = ActiveRequests(scheduler, strict=strict)
        self._counters = EngineCounters()
        self._mask_costs = mask_costs or MaskCosts()
        self._deltas: list[Delta] = []  # of the current step
        self._num_planned = 0  # tasks
        self._num_discarded = 0
        self._served: Counter[str] | None = None  # tokens by tenant in the current commit, if requests wait
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

        Callers must call this before the first step. Sets the token budget: on CPUs under light load, on GPUs
        under any load, but only for modes that mix prompts and decodes.
        """
        mode = self._scheduler.mode
        if (budget := mode.budget) is None or (on_gpu and not mode.mixes):
            return
        if on_gpu:
            tokens = tokens_within_gap(self._runner, budget.while_decoding, budget.most)
            budget.while_decoding = tokens or budget.while_decoding
        else:
            tokens = tokens_beside_decodes(self._runner, budget.while_decoding, self._clock, mixes=mode.mixes)
            budget.least = tokens or budget.least

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
        request = Request(call, self._clock(), self._eos_token_ids)
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

        Commits the steps in flight first; the next `step` returns their deltas. Returns False if the request
        is not running then.
        """
        while len(self._pipeline):
            self._complete()
        request = self._requests.get(request_id)
        if request is None or request.state is not State.RUNNING:
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
        """End every request after a bug in `step`; return that step's deltas and each request's last."""
        self._drop_steps()
        self._fault("the engine failed outside an invocation")
        ended = self._requests.discard_all(error)
        return self._take_deltas() + ended

    @property
    def has_work(self) -> bool:
        """Whether `step` must be called: requests remain, or a step is in flight."""
        return len(self._requests) > 0 or len(self._pipeline) > 0

    def step(self) -> list[Delta]:
        """End requests past their deadline, plan and launch invocations, then complete and commit one.

        Returns the deltas of all affected requests.
        """
        began_s, self._commit_s = self._clock(), None
        self._end_late(began_s)
        while self._pipeline.takes_another and (batch := self._plan()) is not None:
            self._launch(batch)
        if len(self._pipeline):
            batch = self._pipeline.first.batch
            is_committed = self._complete()
            step_s = self._clock() - began_s
            self._counters.count_step(step_s)
            if self._speculation is not None:
                self._speculation.settle(batch, step_s if is_committed else None)
        self._end_costly()
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
            block_tables=self._runner.table_counts,
            preemptions=self._scheduler.num_preemptions,
            entries=self._runner.counts(),
            device_s=self._runner.device_s,
            uploads=self._runner.num_uploads,
            steps_ahead=self._pipeline.num_ahead,
            discarded_tokens=self._num_discarded,
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
        """Return the next batch; None if no batch is due, or after a bug in planning.

        A batch to follow one in flight has no proposed tokens. None if tokens would be proposed for the
        requests in flight: that needs their next tokens.
        """
        last, speculation = self._pipeline.last, self._speculation
        if last is not None and speculation is not None and speculation.would_propose(last.batch):
            return None
        try:
            batch = self._scheduler.plan(may_preempt=last is None)
        except IllegalTransitionError as bug:
            if (ended := self._requests.contain(bug)) is not None:
                self._deltas.append(ended)
            return None
        if batch is None or last is not None or speculation is None:
            return batch
        return speculation.added_to(batch)

    def _launch(self, batch: Batch) -> None:
        began_s = self._clock()
        self._pipeline.launch(batch, began_s)
        for turn, task in enumerate(batch.tasks, self._num_planned):
            if task.request.last_turn < 0:
                task.request.queue_s = began_s - task.request.arrival_s
            task.on_launch(turn)
        self._num_planned += len(batch.tasks)
        if self._speculation is not None and self._pipeline.draws_last:
            self._speculation.draft_ahead(batch)

    def _complete(self) -> bool:
        """Wait for the first step in flight; commit it, or end its requests. Return whether it succeeded."""
        try:
            rows = self._pipeline.complete()
        except DraftError:
            self._abandon()
        except Exception as error:  # the runtimes have no common exception
            self._fail(error)
        else:
            self._counters.consecutive_failures = 0
            self._commit(self._pipeline.first, rows)
            self._pipeline.forget_first()
            self._pipeline.draw_late()
            return True
        return False

    def _fail(self, error: Exception) -> None:
        """Abandon the steps in flight, and end the requests of the first one's batch."""
        batch = self._pipeline.first.batch
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
        for request in {task.request: None for task in batch.tasks if not task.has_left}:
            self._deltas.append(self._requests.end(request, FinishReason.ERROR, shown))
        self._abandon(waits=not isinstance(error, DeviceLostError))

    def _abandon(self, *, waits: bool = True) -> None:
        """Abandon the steps in flight, and preempt their requests: they start again from known tokens."""
        for request in [each for each in self._scheduler.running if each.num_planned > each.num_computed]:
            self._scheduler.preempt(request)
        self._drop_steps(waits=waits)

    def _drop_steps(self, *, waits: bool = True) -> None:
        """Drop the steps in flight and what is queued ahead of the next one; `waits` as for the pipeline."""
        self._pipeline.abandon(waits=waits)
        if self._speculation is not None:
            self._speculation.abandon(waits=waits)

    def _commit(self, step: InFlight, rows: Rows) -> None:
        """Advance each task, publish full pages and sample tokens; a row with NaN ends its request instead.

        Rows of rejected proposed tokens and of ended requests are dropped.
        """
        stride, family = self._cache.stride, step.batch.family
        self._served = Counter() if self._scheduler.waiting else None
        for task, row, lease in zip(step.batch.tasks, rows, step.leases, strict=True):
            request = task.request
            if request.lease is not lease or (task.num_ahead and task.is_rejected):
                self._discard(task, row, lease)
            elif row is None:
                self._advance(task, step)
                lease.is_suspect = True
                self._cache.give_up(lease, task.seq_len)
            elif not is_finite(row):
                self._end_spoiled(task, lease)
            else:
                yields_token = self._advance(task, step)
                if lease.is_suspect or len(task.token_ids) > 1 or task.seq_len % stride == 0:
                    # Full pages of this task, and of earlier tasks that are not published yet.
                    self._cache.publish(lease, request.token_ids, task.seq_len)
                    lease.is_suspect = False  # the row is finite, and attended to all pages of the lease
                if yields_token:
                    self._deltas.append(
                        self._append(request, row)
                        if isinstance(row, int)
                        else self._sample(request, row, family)
                    )
                    if request.matcher is not None and self._jumps_ahead:
                        self._append_forced(request)
        for tenant, num_tokens in (self._served or {}).items():
            self._scheduler.charge(tenant, num_tokens)

    def _discard(self, task: LlmTaskInput, row: Row, lease: Lease) -> None:
        """Drop the row of a request that has ended, or of a rejected proposed token."""
        if not task.num_ahead:
            self._num_discarded += task.completes
            lease.is_suspect |= row is None or not is_finite(row)

    def _end_spoiled(self, task: LlmTaskInput, lease: Lease) -> None:
        """End a request that got a row of NaN."""
        lease.is_suspect = True
        self._cache.retract(lease)
        self._fault(f"request {task.request.request_id} got a row of NaN at {task.seq_len - 1}")
        error = InvocationError(NOT_FINITE)
        self._deltas.append(self._requests.end(task.request, FinishReason.ERROR, error))

    def _advance(self, task: LlmTaskInput, step: InFlight) -> bool:
        """Mark the task's tokens as computed; return whether its row yields the request's next token."""
        request = task.request
        self._counters.count_task(task)
        if request.computed is not None:
            request.computed.append(self._computed(task, step))
        if task.state_page_id is not None and request.lease is not None:
            self._cache.accept(request.lease, task.start_position, task.state_page_id)
        return task.on_commit()

    def _computed(self, task: LlmTaskInput, step: InFlight) -> ComputedTask:
        """Return a task's timing in a step, for a trace; all tasks of a step have the same end."""
        if self._commit_s is None:
            self._commit_s = self._clock()
        return ComputedTask(
            began_s=step.began_s,
            ended_s=self._commit_s,
            device_before_s=step.device_before_s,
            device_after_s=self._runner.device_s,
            start_position=task.start_position,
            num_tokens=len(task.token_ids),
            entry_family=step.batch.family.value,
            batch_tasks=len(step.batch.tasks),
        )

    def _sample(self, request: Request, row: Candidates | Drawn, family: EntryFamily) -> Delta:
        """Append the next token to the request, and finish the request if this token is its last.

        `family` is the family of the entry that computed the row.
        """
        params = request.call.params
        try:
            token_id = self._sampler.sample(row, request)
        except (InvocationError, ConstraintError) as error:
            return self._requests.end(request, FinishReason.ERROR, error)
        logprobs = () if params.logprobs is None else (row_logprobs(row, token_id, params.logprobs),)
        logits: tuple[ChosenLogit, ...] = ()
        if params.chosen_logits:
            logit = row.logit_of(token_id)
            assert logit is not None, "the row has the token's logit where it is asked for"
            logits = (ChosenLogit(logit, family),)
        return self._append(request, token_id, logprobs, logits)

    def _append_forced(self, request: Request) -> None:
        """Append the tokens that a grammar forces after the new one: no draw could yield others.

        The next steps compute the rows of these tokens (`Request.decodes`).
        """
        if request.state is not State.RUNNING:
            return
        for token_id in self._sampler.forced(request):
            self._deltas.append(self._append(request, token_id))
            if request.finish_reason is not None:
                return

    def _append(
        self,
        request: Request,
        token_id: int,
        logprobs: tuple[TokenLogprobs, ...] = (),
        logits: tuple[ChosenLogit, ...] = (),
    ) -> Delta:
        """Append a token to the request, and finish the request if this token is its last."""
        request.token_ids.append(token_id)
        self._counters.generation_tokens += 1
        if self._served is not None:
            self._served[request.tenant] += 1
        reason = stop_token_id = None
        if token_id in request.end_token_ids:
            reason = FinishReason.STOP
            is_eos = token_id in self._eos_token_ids and not request.call.params.ignore_eos
            stop_token_id = None if is_eos else token_id
        elif len(request.token_ids) >= request.max_length:
            reason = FinishReason.LENGTH
        delta = Delta(  # arguments by position: names would take a third longer
            request.call.request_id,
            (token_id,),
            logprobs,
            request.num_cached,
            request.queue_s,
            request.take_computed() if request.computed else (),
            reason,
            stop_token_id,
            None,
            logits,
        )
        return delta if reason is None else self._requests.finish(request, delta)
