"""Speculation in a mixed batch: proposed tokens run together with prompts and decodes.

Each proposed token is a separate task: one more row of its request, with the same block table, at the next
position. Every layer of a packed `extend` stores the keys and values of all rows before any row attends, so a
row attends to the tokens proposed before its own. These rows are the rows that decodes would compute one
after another, and the same kernels compute them, with the same bits.

A layer with a state computes the rows of a request in order, each from the state after the row before it. The
state after a proposed token goes to a page of that token (lease.py). The commit keeps the page of the last
accepted row; the other pages are released.

    batch        request a: its last token at p,  proposed x at p + 1,  y at p + 2
    commit       the row at p yields x, as proposed, so the row at p + 1 is valid: it yields z, not y
                 the row at p + 2 is stale: it is dropped, and z will be computed into its cache slot

Proposals come from prompt lookup if that is on, else from a draft model or the model's own draft layer, if
there is one (drafter.py).

A commit processes rows in order, each like a decode row, so adjustments, grammars, seeds and finish
conditions need no special case. If a grammar forces tokens after an accepted one, these are appended at once:
the row of the accepted token yields nothing, and the next proposed token is compared with the first of them.
Pages are published up to the last accepted row. NaN in a stale row is
harmless: only VMFBs of our own builder pack rows, and its kernels mask values with a select, which drops NaN.

Proposals use the token budget that the batch leaves unused, and pages that no other request will need soon.
There are none while steps without them are faster (pace.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.batching.scheduler import Scheduler
from shortfin_apps.llm.components.engine.drafter import Drafter
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.speculation.acceptance import least_chance
from shortfin_apps.llm.components.speculation.options import SpeculationOptions
from shortfin_apps.llm.components.speculation.pace import Paces
from shortfin_apps.llm.components.speculation.prompt_lookup import PromptLookup
from shortfin_apps.llm.contract.abi import EntryFamily


@dataclass(slots=True)
class SpeculationCounts:
    """Counts since start.

    `drafts`: proposals, at most one per request and step. `proposed`, `accepted`: tokens of these proposals.
    `draft_model_s`: time of the invocations of a draft model or draft layer.
    """

    drafts: int = 0
    proposed: int = 0
    accepted: int = 0
    draft_model_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Proposal:
    request: Request
    observe: Callable[[int, int], None]  # called with the numbers of proposed and accepted tokens
    tasks: Sequence[LlmTaskInput]
    is_drafted: bool  # by the drafter

    @property
    def num_accepted(self) -> int:
        """Number of leading proposed tokens that are the request's, with a known token after them.

        A token with none after it was the request's last, or is to be computed again: its row was not used.
        """
        token_ids, count = self.request.token_ids, 0
        for task in self.tasks:
            if not task.is_followed or token_ids[task.start_position] != task.token_ids[0]:
                break
            count += 1
        return count


class Speculation:
    """Adds proposed tokens to batches, and learns acceptance rates from the results."""

    def __init__(
        self, scheduler: Scheduler, options: SpeculationOptions, drafter: Drafter | None = None
    ) -> None:
        self._scheduler = scheduler
        self._options = options
        self._drafter = drafter
        self._lookups: dict[Request, PromptLookup] = {}
        self._open: list[_Proposal] = []  # of the last batch
        self._paces = Paces()
        self.counts = SpeculationCounts()

    def added_to(self, batch: Batch) -> Batch:
        """Return an `extend` batch with proposed tokens added; `batch` itself if no tokens are proposed.

        Drafts made ahead are dropped if the batch does not use them: it must not be queued after drafts that
        may fail, unless it waits for these, too.
        """
        if self._drafter is None:
            return self._proposing(batch)
        self._drafter.settle()
        added = self._proposing(batch)
        self._drafter.abandon()
        return added

    def _proposing(self, batch: Batch) -> Batch:
        if batch.family is EntryFamily.PREFILL:
            return batch
        self._open.clear()  # not empty only after a bug in the commit
        self._forget_others()
        decodes = [task for task in batch.tasks if task.completes and len(task.token_ids) == 1]
        if not decodes or not self._paces.of(len(decodes)).proposes:
            return batch
        num_rows = sum(len(task.token_ids) for task in batch.tasks)
        least, left = self._least_chance(len(decodes), num_rows), self._scheduler.mode.spare_tokens(batch)
        without = []
        for task in decodes:
            if (proposal := self._proposed(task, least, left)) is not None:
                self._open.append(proposal)
                left -= len(proposal.tasks)
            else:
                without.append(task)
        learn = None
        if self._drafter is not None:
            least = self._least_chance(len(decodes), num_rows, len(without))
            drafted = self._proposed_by(self._drafter, without, least, left)
            learn = partial(self._drafter.learn, {each.request: each.tasks for each in drafted})
            self._open += drafted
        return _with_proposals(batch, {each.request: each.tasks for each in self._open}, learn)

    def draft_ahead(self, batch: Batch) -> None:
        """Draft for the step after `batch`, which is in flight and all of whose tokens the device draws.

        Not for requests with tokens from prompt lookup, as the device compares drafted tokens only.
        """
        if self._drafter is None or not batch.has_proposals or self._prefills_next:
            return
        looked_up = {each.request for each in self._open if not each.is_drafted}
        rows = [task for task in batch.tasks if task.completes and task.request not in looked_up]
        checked = {task.request: task.num_ahead for task in rows}
        if not checked:
            return
        least = self._least_chance(len(checked), len(checked), len(checked))
        left = self._scheduler.mode.spare_tokens(batch) + sum(checked.values())
        wanted: dict[Request, int] = {}
        for request, num_checked in checked.items():
            # At least one token is yielded, and the host proposes none after the request's last.
            count = self._drafter.num_worth(request, least, min(left, _most(request) - 1))
            before = num_checked + 1
            if count:
                count = min(count, self._scheduler.reserve_pages(request, before + count) - before)
            if count > 0:
                wanted[request] = count
                left -= count
        if wanted:
            self._drafter.draft_ahead(wanted, checked)

    @property
    def _prefills_next(self) -> bool:
        """Whether the next batch is likely to have no decodes."""
        scheduler = self._scheduler
        is_prefill_due = scheduler.may_admit() or not all(each.decodes for each in scheduler.running)
        return is_prefill_due and not scheduler.mode.mixes

    def abandon(self, *, waits: bool) -> None:
        """Drop drafts that were made ahead, after a failure; `waits` is False for a lost device."""
        if self._drafter is not None:
            self._drafter.abandon(waits=waits)

    def would_propose(self, batch: Batch) -> bool:
        """Return whether the decodes after `batch`, which is in flight, may get proposals."""
        requests = [task.request for task in batch.tasks if task.completes]
        num_rows = len(requests)
        if not requests or not self._paces.of(num_rows).proposes:
            return False
        if self._options.max_tokens:  # in constant time, because this is called before each step
            least = self._least_chance(num_rows, num_rows)
            if any(self._lookup(r).num_worth(r.token_ids, least, _most(r)) for r in requests):
                return True
        if self._drafter is None:
            return False
        least = self._least_chance(num_rows, num_rows, num_rows)
        return any(self._drafter.num_worth(r, least, _most(r)) for r in requests)

    def settle(self, batch: Batch, seconds: float | None) -> None:
        """Update acceptance rates from a batch, whose step took `seconds`; None: it has failed."""
        total = 0
        for proposal in self._open:
            num_proposed, num_accepted = len(proposal.tasks), proposal.num_accepted
            proposal.observe(num_proposed, num_accepted)
            self.counts.drafts += 1
            self.counts.proposed += num_proposed
            total += num_accepted
        self._open.clear()
        self.counts.accepted += total
        if seconds is not None:
            self._observe(batch, seconds, total)
        if self._drafter is not None:
            self._drafter.settle()
            self._drafter.forget_ended()
            self.counts.draft_model_s = self._drafter.device_s

    def _observe(self, batch: Batch, seconds: float, num_accepted: int) -> None:
        """Tell the pace how long a step of decodes took."""
        tasks = batch.tasks
        if batch.family is EntryFamily.PREFILL or any(len(task.token_ids) > 1 for task in tasks):
            if num_decodes := sum(task.completes and len(task.token_ids) == 1 for task in tasks):
                self._paces.of(num_decodes).pass_over()
            return
        # Tokens that a grammar forces are several rows of a request, and yield one further token.
        num_requests = len({task.request for task in tasks})
        num_tokens = num_requests + num_accepted
        self._paces.of(num_requests).observe(seconds, num_tokens, has_proposals=batch.has_proposals)

    def flush_cache(self) -> None:
        """Free the drafter's own pages, if any, that are cached for prefix sharing but not leased."""
        if self._drafter is not None:
            self._drafter.flush_cache()

    def _least_chance(self, num_decodes: int, num_rows: int, num_drafted: int = 0) -> float:
        """Return the lowest acceptance probability at which a proposed token pays off.

        `num_drafted`: number of requests that are drafted for; if not 0, each token also carries its share of
        the cost of a draft round.
        """
        drafting_cost = self._drafter.round_cost / num_drafted if self._drafter and num_drafted else 0.0
        return least_chance(self._options.row_cost, num_decodes, num_rows, drafting_cost)

    def _lookup(self, request: Request) -> PromptLookup:
        if (lookup := self._lookups.get(request)) is None:
            lookup = self._lookups[request] = PromptLookup(self._options.max_tokens)
        return lookup

    def _proposed(self, last: LlmTaskInput, least: float, left: int) -> _Proposal | None:
        """Return the proposal of at most `left` tokens after the decode `last`; None if there are none."""
        if not self._options.max_tokens:
            return None
        request, lookup = last.request, self._lookup(last.request)
        token_ids = lookup.propose(request.token_ids, least, min(left, _most(request)))
        if token_ids:
            del token_ids[self._scheduler.reserve_proposed(request, len(token_ids)) :]
        return _as_tasks(last, token_ids, lookup.observe, is_drafted=False) if token_ids else None

    def _proposed_by(
        self, drafter: Drafter, decodes: Sequence[LlmTaskInput], least: float, left: int
    ) -> list[_Proposal]:
        """Return the drafter's proposals after these decodes, at most `left` tokens in total.

        Pages are reserved first, because a draft layer writes them; those of tokens that are not drafted are
        released with the others.
        """
        wanted = {}
        for task in decodes:
            request = task.request
            count = drafter.num_worth(request, least, min(left, _most(request)))
            if count and (count := self._scheduler.reserve_proposed(request, count)):
                wanted[request] = count
                left -= count
        if not wanted:
            return []
        drafted = drafter.draft(wanted)
        return [
            _as_tasks(task, token_ids, partial(drafter.observe, task.request), is_drafted=True)
            for task in decodes
            if (token_ids := drafted.get(task.request))
        ]

    def _forget_others(self) -> None:
        """Drop the lookups of requests that do not run."""
        running = self._scheduler.running
        if len(self._lookups) > len(running):
            self._lookups = {each: self._lookups[each] for each in running if each in self._lookups}


def _with_proposals(
    batch: Batch, proposed: Mapping[Request, Sequence[LlmTaskInput]], learn: Callable[[], None] | None
) -> Batch:
    """Return an `extend` batch with proposed tokens after their decodes; `batch` itself if there are none."""
    if not proposed:
        return batch
    tasks: list[LlmTaskInput] = []
    for task in batch.tasks:
        tasks += [task, *(proposed.get(task.request, ()) if task.completes else ())]
    return Batch(EntryFamily.EXTEND, tuple(tasks), has_proposals=True, learn=learn)


def _as_tasks(
    last: LlmTaskInput, token_ids: Sequence[int], observe: Callable[[int, int], None], *, is_drafted: bool
) -> _Proposal:
    """Create the proposal of these tokens, for which pages must be reserved."""
    request = last.request
    assert request.lease is not None, "it runs"
    pages: Sequence[int | None] = request.lease.proposed_page_ids or [None] * len(token_ids)
    tasks = [
        LlmTaskInput.proposed(last, offset, token_id, page_id)
        for offset, (token_id, page_id) in enumerate(zip(token_ids, pages, strict=False), 1)
    ]
    return _Proposal(request, observe, tasks, is_drafted)


def _most(request: Request) -> int:
    """Return the maximum proposed tokens: one less than remain, because the decode itself yields one."""
    return request.call.params.max_tokens - request.num_generated - 1
