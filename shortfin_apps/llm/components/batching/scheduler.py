"""Scheduler: starts waiting requests when there are pages for them, and preempts when pages run out.

Pages are reserved as needed: pages for the prompt when a request starts, then one page each time the request
grows into a new page. While enough pages are available, every running request also has one page reserved
ahead. When no page is left, the youngest running request is preempted and moves to the head of the queue. A
request is never preempted for a younger one, and requests larger than the cache are refused before they are
added, so there is always progress. Window pages are reserved only for the tokens that the next invocation may
compute, not for a full prompt; the cache has enough window pages for any request that runs alone.

waiting_queue.py defines the order of waiting requests. If a request does not fit, later requests that fit
overtake it at most MAX_OVERTAKES times; then all later requests wait until it has started. A long prompt is
skipped while the maximum number of long prompts is being prefilled. A prompt is also skipped while a running
request computes a prefix that both share.

A plan may be made while invocations are in flight. It then counts the tokens that these compute and draw as
computed and drawn, but preempts no request: the invocations in flight still use its pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.batching.fair_share import FairShare
from shortfin_apps.llm.components.batching.mode import BatchMode
from shortfin_apps.llm.components.batching.waiting_queue import WaitingQueue
from shortfin_apps.llm.components.kvcache.cache import KVCache
from shortfin_apps.llm.components.kvcache.lease import Lease
from shortfin_apps.llm.components.request.messages import FinishReason
from shortfin_apps.llm.components.request.request import IllegalTransitionError, Request, State

MAX_OVERTAKES = 32
# Bounds on the work of one step: waiting requests examined, and failed attempts to start a request.
LOOKAHEAD, MAX_MISFITS = 64, 16


# At most MAX_LONG_PREFILLS running requests have more than LONG_PREFILL_TOKENS tokens left to prefill. The
# other places are for short prompts: long prompts share the budget of each invocation, so running more long
# prompts at once makes none of them faster.
MAX_LONG_PREFILLS, LONG_PREFILL_TOKENS = 2, 1024


class Scheduler:
    """Holds the waiting queue and up to `max_running` running requests, and plans invocations.

    `tenant_weights` must be positive; the default weight is 1.
    """

    def __init__(
        self,
        cache: KVCache,
        mode: BatchMode,
        max_running: int,
        tenant_weights: Mapping[str, float] | None = None,
        *,
        max_long_prefills: int = MAX_LONG_PREFILLS,
        long_prefill_tokens: int = LONG_PREFILL_TOKENS,
    ) -> None:
        self._cache = cache
        self.mode = mode
        self.max_running = max_running
        self._max_long_prefills = max_long_prefills
        self._long_prefill_tokens = long_prefill_tokens
        self._share = FairShare(tenant_weights)
        self.waiting = WaitingQueue(self._share)
        self.running: list[Request] = []  # by admission, oldest first
        self.num_preemptions = 0
        self._free_slots = list(range(max_running))
        # The last plan, if it can be followed by another decode of all. None once a request starts or ends.
        self._last: Batch | None = None
        self._num_followers = 0  # further steps for which `_last` holds

    def add(self, request: Request) -> None:
        if request.call.resumes:
            self.waiting.add_first(request)
        else:
            self.waiting.add(request)

    def plan(self, *, may_preempt: bool = True) -> Batch | None:
        """Plan the next invocation; afterwards every running request has pages for all its tokens.

        Returns None if there is nothing to compute, or if a request would have to be preempted and callers do
        not allow it, because invocations are in flight. Raises IllegalTransitionError if a request is in a
        wrong state; callers must then `discard` it.
        """
        if (following := self._following()) is not None:
            return following
        self._last = None
        while not self._reserve_running():
            if not may_preempt:
                return None
            self._preempt_youngest()
        self._admit()
        batch = self.mode.next_batch([request for request in self.running if request.num_unplanned])
        self._keep(batch)
        return batch

    def _following(self) -> Batch | None:
        """Return the last plan's decodes, one token further, if planning anew would give the same."""
        last = self._last
        if last is None or not self._num_followers:
            return None
        if self.may_admit() or not all(map(_is_one_behind, last.tasks)):
            return None  # tokens were accepted or forced, or the last plan was not carried out
        self._num_followers -= 1
        self._last = last.following()
        return self._last

    def _keep(self, batch: Batch | None) -> None:
        """Keep a plan that decodes all running requests, with the number of steps that it holds for."""
        if batch is None or len(batch.tasks) != len(self.running) or not batch.is_decode:
            return
        self._last = batch
        self._num_followers = min(_steps_before_change(task, self._cache.stride) for task in batch.tasks)

    def reserve_proposed(self, request: Request, count: int) -> int:
        """Reserve pages for `count` proposed tokens of a running request; returns how many fit in its pages.

        Pages that other running requests may need for their next tokens are not taken.
        """
        assert request.lease is not None
        count = min(count, self.reserve_pages(request, count))
        return self._cache.reserve_proposed(request.lease, count, self._num_kept)

    def reserve_pages(self, request: Request, count: int) -> int:
        """Reserve pages for `count` further tokens of a running request; returns how many fit in its pages.

        Like `reserve_proposed`, but without pages for states.
        """
        stride, num_tokens = self._cache.stride, len(request.token_ids) + count
        missing = -(-num_tokens // stride) - request.num_pages
        if missing > 0 and self._cache.available().fewest >= self._num_kept + missing:
            self._reserve(request, num_tokens)
        return request.num_pages * stride - len(request.token_ids)

    @property
    def _num_kept(self) -> int:
        """The number of pages that running requests may need for their next tokens."""
        return 2 * len(self.running)

    def may_admit(self) -> bool:
        """Return whether `plan` might start a request.

        False if no request waits, `max_running` requests run, or each candidate has failed to fit and no page
        has become available since.
        """
        if not self.waiting or len(self.running) >= self.max_running:
            return False
        available = self._cache.available()
        for request in islice(self.waiting, LOOKAHEAD):
            if request.blocked_at is None or available.exceeds(request.blocked_at):
                return True
            if request.num_overtakes >= MAX_OVERTAKES:
                return False
        return False

    def charge(self, tenant: str, tokens: int) -> None:
        """Charge tokens as service to a tenant."""
        self._share.charge(tenant, tokens)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a waiting or running request and release its pages. Raises IllegalTransitionError."""
        self._last = None
        remove = self._remove_running if request.state is State.RUNNING else self.waiting.remove
        request.finish(reason, self._cache)
        try:
            remove(request)
        except ValueError:  # the request is not in the list for its state
            raise IllegalTransitionError(request, State.FINISHED) from None

    def discard(self, request: Request) -> None:
        """End a request in any state, even an inconsistent one."""
        self._last = None
        if request in self.running:
            self._remove_running(request)
        if request in self.waiting:
            self.waiting.remove(request)
        request.discard(self._cache)

    def preempt(self, request: Request) -> None:
        """Move a running request back to the head of the queue, and free its pages."""
        self._last = None
        request.preempt(self._cache)
        self._remove_running(request)
        self.waiting.add_first(request)
        self.num_preemptions += 1

    def _remove_running(self, request: Request) -> None:
        # Another request may get the slot at once: it is written after the invocations in flight.
        self.running.remove(request)
        self._free_slots.append(request.slot)

    def _reserve_running(self) -> bool:
        """Reserve pages for each running request's tokens; requests keep theirs if later ones get none.

        Returns whether all requests have got their pages.
        """
        has_grown, stride = False, self._cache.stride
        for request in self.running:
            if (num_tokens := request.num_tokens) <= request.num_pages * stride:
                continue
            num_pages = len(request.page_ids)
            if not self._reserve(request, min(num_tokens, request.num_planned + request.num_unplanned)):
                return False
            has_grown |= len(request.page_ids) > num_pages
        if has_grown:
            self._grow_ahead()
        return True

    def _grow_ahead(self) -> None:
        """Reserve a page ahead for each running request, if at least as many pages remain available.

        All block tables then change in the same step, once per page of tokens, instead of each in a different
        step.
        """
        if self._cache.available().fewest < 2 * len(self.running):
            return
        for request in self.running:
            self._reserve(request, min(request.num_tokens + self._cache.stride, request.max_length))

    def _reserve(self, request: Request, num_tokens: int) -> bool:
        assert request.lease is not None
        if num_tokens <= request.num_pages * self._cache.stride:
            return True
        return self._reserve_in(request.lease, num_tokens, request.num_planned)

    def _reserve_in(self, lease: Lease, num_tokens: int, num_planned: int) -> bool:
        """Reserve pages for `num_tokens`, but window pages only as far as the next invocation may compute."""
        ahead = self.mode.tokens_ahead(self._cache.stride)
        end = num_tokens if ahead is None else min(num_tokens, num_planned + ahead)
        return self._cache.reserve(lease, num_tokens, end)

    def _preempt_youngest(self) -> None:
        assert len(self.running) > 1, "a request larger than the cache was admitted"
        self.preempt(self.running[-1])

    def _admit(self) -> None:
        """Start requests that fit, in order; others are overtaken at most MAX_OVERTAKES times each."""
        if not self.waiting or len(self.running) >= self.max_running:
            return
        prefills = [r for r in self.running if len(r.token_ids) - r.num_computed > 1]
        blocker: Request | None = None
        misfits = 0
        for request in islice(self.waiting, LOOKAHEAD):
            if request.blocked_at is not None and not self._cache.available().exceeds(request.blocked_at):
                blocker = blocker or request  # no pages were freed since the last attempt
            elif self._awaits_prefix(request, prefills) or self._exceeds_long_prefills(request, prefills):
                continue
            elif self._start(request):
                prefills.append(request)
                if blocker is not None:
                    blocker.num_overtakes += 1
            else:
                blocker = blocker or request
                misfits += 1
            overtaken = blocker is not None and blocker.num_overtakes >= MAX_OVERTAKES
            if overtaken or misfits == MAX_MISFITS or len(self.running) >= self.max_running:
                return

    def _awaits_prefix(self, request: Request, prefills: list[Request]) -> bool:
        """Return whether a running request will compute the next page that `request` could share.

        If `request` started now, both would compute that page. Once the page is published, `request` finds it
        in the cache.
        """
        if not self._cache.shares_prefixes:
            return False
        stride = self._cache.stride
        related = [r for r in prefills if _same_start(r, request, stride)]
        if not related:
            return False
        end = self._cache.match_length(request.token_ids, request.call.cache_salt) + stride
        return end < len(request.token_ids) and any(
            r.num_computed < end <= len(r.token_ids) and r.token_ids[:end] == request.token_ids[:end]
            for r in related
        )

    def _exceeds_long_prefills(self, request: Request, prefills: list[Request]) -> bool:
        """Return whether starting `request` would exceed the limit on concurrent long prefills."""
        limit = self._long_prefill_tokens
        if len(request.token_ids) <= limit:
            return False
        if sum(r.num_unplanned > limit for r in prefills) < self._max_long_prefills:
            return False
        cached = self._cache.match_length(request.token_ids, request.call.cache_salt)
        return len(request.token_ids) - cached > limit

    def _start(self, request: Request) -> bool:
        available = self._cache.available()
        lease = self._cache.acquire(request.token_ids, request.call.cache_salt)
        # Each running request may need a page for its next token. Without that many pages left, the new
        # request would be preempted at once.
        if not self._reserve_in(lease, len(request.token_ids), lease.num_cached_tokens) or (
            self.running and self._cache.available().fewest < len(self.running)
        ):
            self._cache.release(lease)
            request.blocked_at = available
            return False
        try:
            request.start(lease, self._free_slots[-1])
        except IllegalTransitionError:
            self._cache.release(lease)
            raise
        if request.last_turn < 0:  # tenants are not charged again for a restart after preemption
            self._share.charge(request.tenant, request.num_unplanned)
        self._free_slots.pop()
        self.waiting.remove(request)
        self.running.append(request)
        return True


def _is_one_behind(task: LlmTaskInput) -> bool:
    """Return whether the task was the request's last, and one token after it is unplanned."""
    request, end = task.request, task.seq_len
    return request.num_planned == end and len(request.token_ids) + request.num_drawing == end + 1


def _steps_before_change(task: LlmTaskInput, stride: int) -> int:
    """Return the decodes after this one until the request's last token, or until it needs another page."""
    request = task.request
    return min(request.max_length - 1, request.num_pages * stride) - task.seq_len


def _same_start(one: Request, other: Request, length: int) -> bool:
    return one.call.cache_salt == other.call.cache_salt and one.token_ids[:length] == other.token_ids[:length]
