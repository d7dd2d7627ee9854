"""Draft layer: the model's own extra layer proposes tokens (model/draft_layer.py).

    step n      the main model computes s at position p - 1 and samples t. Its entry also stores the draft
                layer's keys and values of s, and keeps the hidden state of s.
    step n + 1  the draft layer runs two rounds: from the hidden state of s and t, it samples x; from its own
                result and x, it samples y.
                The main model computes t, x and y, one row each (speculation.py). Its entry overwrites the
                draft layer's keys and values of these, and the hidden states.
                All are queued at once: x and y stay in the device's table of tokens, until the host waits
                for the main model's rows. If a VMFB draws no tokens of such rows, the host samples them, and
                waits for each round.

The draft layer uses the pages of the main model's leases: there is nothing to catch up on, and shared
prefixes are shared with it. If the hidden state before a request's first computed token is unknown, as after
a shared prefix, zeros stand for it: the first draft may then be wrong.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import takewhile, zip_longest

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.engine.drafter import Drafter, DraftError, DraftOptions
from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.invocation.launch import DrawLaunch, Launch
from shortfin_apps.llm.components.kvcache.cache import KVCache
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.sampling.candidates import Candidates
from shortfin_apps.llm.components.sampling.device_sampling import device_fields
from shortfin_apps.llm.contract.abi import EntryFamily
from shortfin_apps.llm.contract.errors import DeviceLostError


class DraftLayer(Drafter):
    """Drafts tokens for an engine's requests, with the `draft` entries of the main model's program."""

    NAME = "draft layer"

    def __init__(self, runner: BatchRunner, cache: KVCache, options: DraftOptions) -> None:
        super().__init__(runner, cache, options)
        # Invocations of the last draft and their draws, until the host knows the tokens.
        self._queued: list[tuple[Launch, list[DrawLaunch]]] = []

    def num_worth(self, request: Request, least: float, most: int) -> int:
        """Draft nothing while other known tokens than the last have to be computed, as after forced ones."""
        is_behind = request.num_planned < len(request.token_ids) - 1
        return 0 if is_behind else super().num_worth(request, least, most)

    def learn(self, proposed: Mapping[Request, Sequence[LlmTaskInput]]) -> None:
        """Wait for the tokens of the last draft; those after a row that is not finite are given up."""
        if not self._queued:
            return
        try:
            with self._counting_time():
                drafted = self._drawn()
        except Exception as error:
            self._abandon(waits=not isinstance(error, DeviceLostError))
            self._count_failure(error)
            if isinstance(error, DeviceLostError):
                raise
            raise DraftError(f"an invocation of the {self.NAME} failed") from error
        self._queued = []
        self._failures = 0
        for request, tasks in proposed.items():
            finite = list(takewhile(lambda token_id: token_id >= 0, drafted[request]))
            for task, token_id in zip_longest(tasks, finite[: len(tasks)]):
                task.learn(token_id)

    def flush_cache(self) -> None:
        """Do nothing: the pages are the main model's."""

    def _drawn(self) -> Mapping[Request, Sequence[int]]:
        """Wait for the last draft, and return each request's tokens; -1 for a row that is not finite."""
        drafted: dict[Request, list[int]] = defaultdict(list)
        for launch, draws in self._queued:
            self._runner.wait(launch)
            for draw in draws:
                for row, token_id in zip(draw.rows, self._runner.drawn(draw), strict=True):
                    drafted[launch.batch.tasks[row].request].append(token_id)
        return drafted

    def _rounds(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        if not self._runner.buckets.draws_rows:
            return super()._rounds(wanted)
        try:
            for number in range(max(wanted.values())):
                self._queue_round([r for r, count in wanted.items() if count > number], number)
        except BaseException as error:
            self._abandon(waits=not isinstance(error, DeviceLostError))
            raise
        return {r: [-1 - self._place(r, number) for number in range(count)] for r, count in wanted.items()}

    def _queue_round(self, requests: Sequence[Request], number: int) -> None:
        """Queue the draft of one token for each request, the one after `number` others."""
        most = self._runner.buckets.most_drafts
        for first in range(0, len(requests), most):
            part = requests[first : first + most]
            tasks = [self._task(r, self._before(r, number), len(r.token_ids) - 1 + number) for r in part]
            launch = self._runner.launch(Batch(EntryFamily.DRAFT, tuple(tasks)))
            draws: list[DrawLaunch] = []
            self._queued.append((launch, draws))
            slots = [self._place(request, number) for request in part]
            draws.extend(self._runner.launch_draws(launch, range(len(part)), self._fields, slots=slots))

    def _abandon(self, *, waits: bool) -> None:
        """Give up the queued invocations of a draft that cannot be completed."""
        for launch, draws in self._queued:
            self._runner.abandon(launch, waits=waits)
            for draw in draws:
                self._runner.abandon(draw, waits=waits)
        self._queued = []

    def _fields(self, request: Request) -> array[int]:
        return device_fields(request, self._runner.num_candidates, draws_rows=True)

    def _before(self, request: Request, number: int) -> Sequence[int]:
        """Return the token before the one that is drafted after `number` others."""
        return [-1 - self._place(request, number - 1)] if number else request.token_ids[-1:]

    def _place(self, request: Request, number: int) -> int:
        return self._runner.slots.drafted_slot(request.slot, number)

    def _first_round(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        tasks = [self._task(r, r.token_ids[-1:], len(r.token_ids) - 1) for r in wanted]
        rows = zip(wanted, self._run(tasks), strict=True)
        return {request: self._next(request, row, 0) for request, row in rows if row.is_finite}

    def _task(self, request: Request, token_ids: Sequence[int], start: int) -> LlmTaskInput:
        lease = request.lease
        assert lease is not None, "it runs"
        end = start + len(token_ids)
        return LlmTaskInput(request, token_ids, start, end, lease.page_ids, lease.window_page_ids)

    def _run(self, tasks: Sequence[LlmTaskInput]) -> list[Candidates]:
        rows: list[Candidates] = []
        most, with_logits = self._runner.buckets.most_drafts, not self._runner.num_candidates
        for first in range(0, len(tasks), most):
            part = tuple(tasks[first : first + most])
            result = self._runner.run(Batch(EntryFamily.DRAFT, part))
            rows += [result.row(index, with_logits=with_logits) for index in range(len(part))]
        return rows

    def _is_finite(self, request: Request, row: Candidates) -> bool:
        return row.is_finite

    def _fail(self) -> None:
        self._runner.forget_state()
