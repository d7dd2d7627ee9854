"""Draft layer: the model's own extra layer proposes tokens (model/draft_layer.py).

    step n      the main model computes s at position p - 1 and samples t. Its entry also stores the draft
                layer's keys and values of s, and keeps the hidden state of s.
    step n + 1  the draft layer runs two rounds: from the hidden state of s and t, it samples x; from its own
                result and x, it samples y.
                The main model computes t, x and y, one row each (speculation.py). Its entry overwrites the
                draft layer's keys and values of these, and the hidden states.
                If the device draws the tokens of all rows, the rounds of step n + 2 follow: the first one
                finds on the device which of x and y were right, and begins after them.

All of a step are queued at once: drafted tokens stay in the device's table. So the device runs the rounds of
step n + 2 while the host commits step n + 1 and plans the next one. Nothing depends on their being right: if
the host finds another token to be the last, as after a request's preemption, they are not proposed.

The draft layer uses the pages of the main model's leases: there is nothing to catch up on, and shared
prefixes are shared with it. Rounds that are queued ahead may write pages of a request that has ended since,
but before any later invocation; pages are zeroed only after they are over. They write positions that have no
page of their own to the scratch page. If the hidden state before a request's first computed token is unknown,
as after a shared prefix, zeros stand for it: the first draft may then be wrong.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shortfin_apps.llm.components.batching.batch import LlmTaskInput
from shortfin_apps.llm.components.engine.drafter import Drafter, DraftOptions, Queued
from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.invocation.launch import Launch
from shortfin_apps.llm.components.kvcache.cache import KVCache
from shortfin_apps.llm.components.kvcache.lease import Lease
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.sampling.device_sampling import device_fields
from shortfin_apps.llm.contract.errors import DeviceLostError


@dataclass(slots=True)
class _Ahead:
    """Rounds that are queued ahead of the step that will propose their tokens.

    `drafts`: the requests, with their leases and numbers of drafted tokens. `lengths`: the requests' numbers
    of tokens once the step before is committed; None until then.
    """

    launches: list[Queued] = field(default_factory=list)
    drafts: dict[Request, tuple[Lease | None, int]] = field(default_factory=dict)
    lengths: dict[Request, int] | None = None

    def num_for(self, request: Request) -> int:
        """Return how many tokens to propose for the request: 0 if another token than expected is its last."""
        lease, count = self.drafts.get(request, (None, 0))
        is_expected = self.lengths is not None and self.lengths.get(request) == len(request.token_ids)
        return count if is_expected and lease is not None and lease is request.lease else 0


class DraftLayer(Drafter):
    """Drafts tokens for an engine's requests, with the `draft` entries of the main model's program."""

    NAME = "draft layer"

    def __init__(self, runner: BatchRunner, cache: KVCache, options: DraftOptions) -> None:
        super().__init__(runner, cache, options)
        self._ahead: _Ahead | None = None

    def num_worth(self, request: Request, least: float, most: int) -> int:
        """Draft nothing while other known tokens than the last have to be computed, as after forced ones.

        If rounds are queued ahead, only their tokens are proposed.
        """
        if self._ahead is not None:
            return max(0, min(most, self._ahead.num_for(request)))
        is_behind = request.num_planned < len(request.token_ids) - 1
        return 0 if is_behind else super().num_worth(request, least, most)

    def draft_ahead(self, wanted: Mapping[Request, int], checked: Mapping[Request, int]) -> None:
        """Queue rounds from the tokens that the batch in flight will turn out to end with."""
        ahead = _Ahead(drafts={request: (request.lease, count) for request, count in wanted.items()})
        try:
            with self._counting_time():
                self._queue(wanted, ahead.launches, checked)
        except Exception as error:  # the runtimes have no common exception
            self._give_up(ahead.launches, waits=not isinstance(error, DeviceLostError))
            self._count_failure(error)
        else:
            self._ahead = ahead

    def settle(self) -> None:
        if (ahead := self._ahead) is None:
            return
        if ahead.lengths is None:
            ahead.lengths = {request: len(request.token_ids) for request in ahead.drafts}
        if self._cache.has_suspects or not any(map(ahead.num_for, ahead.drafts)):
            self.abandon()

    def abandon(self, *, waits: bool = True) -> None:
        if self._ahead is not None:
            self._give_up(self._ahead.launches, waits=waits)
            self._ahead = None

    def flush_cache(self) -> None:
        """Do nothing: the pages are the main model's."""

    def _drawn(self, queued: Sequence[Queued]) -> Mapping[Request, Sequence[int]]:
        drafted: dict[Request, list[int]] = defaultdict(list)
        for launch in queued:
            assert isinstance(launch, Launch), "a round is one invocation, which draws its tokens"
            token_ids = self._runner.wait(launch)
            assert token_ids is not None, "the device draws them"
            for task, token_id in zip(launch.batch.tasks, token_ids, strict=True):
                drafted[task.request].append(token_id)
        return drafted

    def _rounds(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        if self._ahead is not None:
            self._queued, self._ahead = self._ahead.launches, None
        else:
            self._queue(wanted, self._queued)
        place = self._runner.slots.drafted_place
        return {
            r: [-1 - place(r.slot, len(r.token_ids) + number) for number in range(count)]
            for r, count in wanted.items()
        }

    def _queue(
        self,
        wanted: Mapping[Request, int],
        launches: list[Queued],
        checked: Mapping[Request, int] | None = None,
    ) -> None:
        """Queue the rounds of a draft, as many for each request; those near their context's end get none."""
        most = self._runner.buckets.most_drafts
        tasks = [self._task(request, None if checked is None else checked[request]) for request in wanted]
        num_rounds = max(wanted.values())
        tasks = [task for task in tasks if task.seq_len + num_rounds - 1 <= self._options.max_seq_len]
        for first in range(0, len(tasks), most):
            part = tasks[first : first + most]
            numbers = [] if checked is None else [checked[task.request] for task in part]
            launches.extend(self._runner.launch_drafts(part, num_rounds, self._fields, numbers))

    def _task(self, request: Request, num_checked: int | None) -> LlmTaskInput:
        """Create a task of the request's last token; it ends with the last that may turn out to be right."""
        lease, start = request.lease, len(request.token_ids) - 1
        assert lease is not None, "it runs"
        end = start + 1 if num_checked is None else start + num_checked + 2
        page_ids = lease.page_ids, lease.window_page_ids
        return LlmTaskInput(request, request.token_ids[-1:], start, end, *page_ids)

    def _fields(self, request: Request) -> array[int]:
        buckets = self._runner.buckets
        return device_fields(request, self._runner.num_candidates, draws_rows=buckets.draws_rows)

    def _fail(self) -> None:
        self._runner.forget_state()
