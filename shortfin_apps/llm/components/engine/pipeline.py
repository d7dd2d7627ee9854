"""The steps in flight: batches on the device's queue, before the tokens of the first one are known.

    plan n + 1      which tokens of which requests: lengths and pages are certain, token IDs need not be
    launch n + 1    queue the batch, the draws of its next tokens into the device's token table (abi.py), and
                    the terms of these tokens' log-probabilities
    complete n      wait for the tokens of step n
    commit n        append them, publish pages, end requests
    draw n + 1      queue the draws that depend on the tokens of step n: masks of grammars, bans after words;
                    none for a row whose next token a grammar forces, because its commit appended that token

The device thus always has work while the host plans and commits. With depth 0, each step is completed before
the next one is planned. The next step also waits if the host must choose a token of the last one, if tokens
were proposed (speculation.py), or if pages must be zeroed.

A request may end (stop token, abort, deadline, NaN) while a later step computes its next token. That token is
discarded. Its lease keeps the pages until the steps in flight are over, so nobody else gets pages that they
write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.engine.row_reader import Row, RowReader, Rows
from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.invocation.launch import DrawLaunch, Launch, LogprobsLaunch
from shortfin_apps.llm.components.kvcache.cache import KVCache
from shortfin_apps.llm.components.kvcache.lease import Lease
from shortfin_apps.llm.components.request.request import Chooser, Request
from shortfin_apps.llm.components.sampling.candidates import Drawn
from shortfin_apps.llm.components.sampling.row_edits import RowEdits
from shortfin_apps.llm.components.sampling.sampler import Sampler
from shortfin_apps.llm.contract.abi import Layout


@dataclass(frozen=True, slots=True)
class RowChoosers:
    """The rows of a batch by what chooses their next token; rows that yield none are left out.

    `edits` has the edits of each row of `adjusted`. `is_settled`: the device chooses all, and will choose all
    further tokens of these requests in the same way.
    """

    device: Sequence[int] = ()
    adjusted: Sequence[int] = ()
    late: Sequence[int] = ()
    host: Sequence[int] = ()
    edits: Sequence[RowEdits] = ()
    is_settled: bool = False


@dataclass(slots=True, eq=False)
class InFlight:
    """A step in flight: its batch, and what chooses the next token of each of the batch's rows.

    `unread` rows are read by the host, `late` rows are drawn by the device once the host knows the step
    before. `draws_all`: the batch runs on a decode loop. `error` is why the step could not be queued.
    """

    batch: Batch
    began_s: float
    device_before_s: float  # device seconds before the step
    leases: Sequence[Lease]
    launch: Launch | None = None
    unread: set[int] = field(default_factory=set)
    late: list[int] = field(default_factory=list)
    draws: list[DrawLaunch] = field(default_factory=list)
    logprobs: list[LogprobsLaunch] = field(default_factory=list)
    error: Exception | None = None

    @property
    def lets_others_follow(self) -> bool:
        """Whether the next step can be queued before this one's tokens are known."""
        return not (self.late or self.unread or self.error or self.batch.has_proposals)

    @property
    def draws_all(self) -> bool:
        return self.launch is not None and self.launch.shape.layout is Layout.LOOP


class Pipeline:
    """Launches steps and completes them in order; at most `depth` steps are queued after the first.

    `num_ahead` counts the steps that were queued while another was in flight.
    """

    def __init__(self, runner: BatchRunner, sampler: Sampler, cache: KVCache, depth: int) -> None:
        self._runner = runner
        self._sampler = sampler
        self._reader = RowReader(runner, sampler)
        self._cache = cache
        self._depth = depth
        self._steps: deque[InFlight] = deque()
        # The last series of batches with all tokens chosen by the device, and the choosers of its rows.
        self._settled: tuple[object, RowChoosers] = None, RowChoosers()
        # Edits of requests with a final chooser in the last batch with adjusted rows.
        self._kept_edits: dict[Request, RowEdits] = {}
        self.num_ahead = 0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def takes_another(self) -> bool:
        """Whether another step may be planned and launched now."""
        if not self._steps:
            return True
        can_follow = len(self._steps) <= self._depth and self._steps[-1].lets_others_follow
        return can_follow and not self._cache.has_suspects  # zeroed only while nothing is in flight

    @property
    def draws_last(self) -> bool:
        """Whether the device draws all tokens of the last step, so that the host reads no rows of it."""
        last = self.last
        return last is not None and not (last.unread or last.late or last.error)

    @property
    def first(self) -> InFlight:
        """The step that `complete` waits for."""
        return self._steps[0]

    @property
    def last(self) -> InFlight | None:
        return self._steps[-1] if self._steps else None

    def launch(self, batch: Batch, began_s: float) -> None:
        """Queue a batch. A failure to do so is reported when the step is completed."""
        leases = [lease for task in batch.tasks if (lease := task.request.lease) is not None]
        step = InFlight(batch, began_s, self._runner.device_s, leases)
        self._cache.hold(leases)
        self.num_ahead += bool(self._steps)
        try:
            self._queue(step)
        except Exception as error:  # the runtimes have no common exception
            step.error = error
        self._steps.append(step)

    def draw_late(self) -> None:
        """Queue the draws of the first step in flight that needed the tokens of the step before."""
        if self._steps and self._steps[0].late and self._steps[0].error is None:
            try:
                self._draw_late(self._steps[0])
            except Exception as error:
                self._steps[0].error = error

    def complete(self) -> Rows:
        """Wait for the first step in flight, and return its rows. Raises InvocationError, DraftError.

        All rows are fetched here. A commit makes no access to the device and so cannot fail halfway.
        """
        step = self._steps[0]
        if step.error is not None:
            raise step.error
        assert step.launch is not None, "it was queued"
        assert not step.late, "the step before was committed"
        if step.unread:
            self._reader.prepare(step.batch, step.unread)
        if step.batch.learn is not None:
            step.batch.learn()
        drawn = self._runner.wait(step.launch)
        rows: list[Row] = [None] * len(step.batch.tasks)
        if drawn is not None:
            rows[:] = drawn
        if step.unread:
            read = self._reader.rows(step.launch, step.unread)
            for row in step.unread:
                rows[row] = read[row]
        for draw in step.draws:
            for row, token_id in zip(draw.rows, self._runner.drawn(draw), strict=True):
                rows[row] = token_id
        for launch in step.logprobs:
            for row, terms in zip(launch.rows, self._runner.terms(launch), strict=True):
                drawn_id = rows[row]
                assert isinstance(drawn_id, int), "the device drew the token"
                rows[row] = Drawn(drawn_id, terms.logit, terms)
        return rows

    def forget_first(self) -> None:
        """Remove the first step, which was completed and committed; its leases may be released now."""
        self._cache.let_go(self._steps.popleft().leases)

    def abandon(self, *, waits: bool = True) -> None:
        """Drop all steps in flight, ignoring failures.

        Callers must have released the leases of requests that end with them, and must set `waits` to False
        for a lost device: the steps may never finish. Pages that the steps wrote become suspect.
        """
        for step in self._steps:
            if step.batch.learn is not None and waits:
                with suppress(Exception):  # the caller already knows that something failed
                    step.batch.learn()
            for launch in (step.launch, *step.draws, *step.logprobs):
                if launch is not None:
                    self._runner.abandon(launch, waits=waits)
            for lease in step.leases:
                lease.is_suspect = True
        while self._steps:
            self.forget_first()
        self._runner.forget_state()

    def _queue(self, step: InFlight) -> None:
        if not self._steps:
            self._runner.clear_suspects(self._cache)
        fields = self._sampler.device_fields if self._depth else None
        step.launch = self._runner.launch(step.batch, fields)
        if fields is None:
            step.unread.update(range(len(step.batch.tasks)))
            return
        choosers = self._choosers(step)
        if not step.draws_all:
            tasks = [step.batch.tasks[row] for row in choosers.device]
            slots = self._runner.slots.chosen_places(tasks) if step.batch.has_proposals else None
            self._draw(step, choosers.device, slots=slots)
        self._draw(step, choosers.adjusted, choosers.edits)
        self._compute_terms(step, [*choosers.device, *choosers.adjusted])
        step.unread.update(choosers.host)
        step.late += choosers.late
        if not self._steps and step.late:
            self._draw_late(step)

    def _choosers(self, step: InFlight) -> RowChoosers:
        """Return what chooses the next token of each row; the same object for all batches of a series."""
        series, choosers = self._settled
        if step.batch.series is not series:
            choosers = self._new_choosers(step)
            if choosers.is_settled:
                self._settled = step.batch.series, choosers
        return choosers

    def _new_choosers(self, step: InFlight) -> RowChoosers:
        tasks = step.batch.tasks
        rows = [row for row, task in enumerate(tasks) if task.completes]
        if not (step.draws_all or self._runner.buckets.draws_rows):
            return RowChoosers(host=rows)
        by_chooser: dict[Chooser, list[int]] = {chooser: [] for chooser in Chooser}
        for row in rows:
            by_chooser[tasks[row].request.chooser or self._chooser(tasks[row])].append(row)
        if step.batch.has_proposals:
            # Several rows have the same slot, so its token and counts are not those before each row.
            device = [row for row in by_chooser[Chooser.DEVICE] if not tasks[row].request.needs_terms]
            return RowChoosers(device=device, host=sorted({*rows} - {*device}))
        adjusted = [tasks[row].request for row in by_chooser[Chooser.ADJUSTED]]
        edits = [self._edits(request) for request in adjusted]
        self._kept_edits = {
            request: of_row for request, of_row in zip(adjusted, edits, strict=True) if request.chooser
        }
        is_settled = len(rows) == len(tasks) and all(
            task.request.chooser in (Chooser.DEVICE, Chooser.ADJUSTED) for task in tasks
        )
        return RowChoosers(
            device=by_chooser[Chooser.DEVICE],
            adjusted=by_chooser[Chooser.ADJUSTED],
            late=by_chooser[Chooser.LATE],
            host=by_chooser[Chooser.HOST],
            edits=edits,
            is_settled=is_settled,
        )

    def _edits(self, request: Request) -> RowEdits:
        if (kept := self._kept_edits.get(request)) is not None:
            return kept
        edits = self._sampler.row_edits(request, request.num_drawing)
        assert edits is not None, "the device can adjust the row"
        return edits

    def _chooser(self, task: LlmTaskInput) -> Chooser:
        request = task.request
        chooser = self._sampler.chooser(request, request.num_drawing + task.num_ahead)
        if request.num_generated + request.num_drawing >= request.call.params.min_tokens:
            request.next_mask.is_awaited = chooser is Chooser.LATE
            request.chooser = chooser  # only `min_tokens` depends on the output's length
        return chooser

    def _draw_late(self, step: InFlight) -> None:
        """Queue the draws of the rows that need edits; the host reads rows that the device cannot draw.

        A row draws nothing if its request has ended, or if the next token has been forced meanwhile.
        """
        rows: list[int] = []
        drawn_edits: list[RowEdits] = []
        for row in step.late:
            task = step.batch.tasks[row]
            if task.has_left:
                continue
            if task.is_followed:
                task.skip_draw()
            elif (edits := self._sampler.row_edits(task.request)) is None or edits.may_ban_all():
                step.unread.add(row)
            else:
                rows.append(row)
                drawn_edits.append(edits)
        step.late.clear()
        self._draw(step, rows, drawn_edits)
        self._compute_terms(step, rows)

    def _draw(
        self,
        step: InFlight,
        rows: Sequence[int],
        edits: Sequence[RowEdits] = (),
        *,
        slots: Sequence[int] | None = None,
    ) -> None:
        """Queue draws; `slots` as for `BatchRunner.launch_draws`."""
        if rows and step.launch is not None:
            # One by one: each is waited for if the next one fails.
            fields = self._sampler.device_fields
            step.draws.extend(self._runner.launch_draws(step.launch, rows, fields, edits, slots=slots))

    def _compute_terms(self, step: InFlight, rows: Sequence[int]) -> None:
        """Queue what the host needs of these rows besides their tokens; their draws must be queued."""
        tasks = step.batch.tasks
        slots = {row: request.slot for row in rows if (request := tasks[row].request).needs_terms}
        if slots and step.launch is not None:
            step.logprobs.extend(self._runner.launch_logprobs(step.launch, slots))
