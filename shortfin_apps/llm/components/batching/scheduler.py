"""Who runs: admission from the waiting queue to pages, and preemption when they run out.

Pages are claimed as needed. The prompt's pages are reserved when a request starts, one more each time
it grows into a new page, and while there is room a page ahead for everybody; when none is left, the
youngest running request goes back to the head of the queue. The oldest is never preempted for a younger
one, and a request that could not run alone is refused before it gets here, so somebody always makes
progress.

The queue says whose turn it is (waiting_queue.py). A waiting request that does not fit is overtaken by
later ones that do, but only so often: then everybody behind it waits until it has started. A long
prompt is passed over while as many of them as may are being prefilled; one that shares a prefix with a
prompt under way, until that is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

from shortfin_apps.llm.components.batching.batch import Batch
from shortfin_apps.llm.components.batching.fair_share import FairShare
from shortfin_apps.llm.components.batching.mode import BatchMode
from shortfin_apps.llm.components.batching.waiting_queue import WaitingQueue
from shortfin_apps.llm.components.kvcache.base import KVCache
from shortfin_apps.llm.components.request.messages import FinishReason
from shortfin_apps.llm.components.request.request import IllegalTransitionError, Request, State

MAX_OVERTAKES = 32
# A long queue costs no time: so many of it are looked at in one step, and so many tried in vain.
LOOKAHEAD, MAX_MISFITS = 64, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingOptions:
    """At most `max_long_prefills` running requests have more than `long_prefill_tokens` left to prefill.

    `tenant_weights` are shares of the service, positive, and 1 for a tenant that is not named.
    """

    max_long_prefills: int = 2
    long_prefill_tokens: int = 1024
    tenant_weights: Mapping[str, float] = field(default_factory=dict)


DEFAULT_SCHEDULING = SchedulingOptions()


class Scheduler:
    """`max_running` is the most requests in progress at once."""

    def __init__(
        self,
        cache: KVCache,
        mode: BatchMode,
        max_running: int,
        options: SchedulingOptions = DEFAULT_SCHEDULING,
    ) -> None:
        self._cache = cache
        self._mode = mode
        self._max_running = max_running
        self._options = options
        self._share = FairShare(options.tenant_weights)
        self.waiting = WaitingQueue(self._share)
        self.running: list[Request] = []  # by admission, oldest first
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        if request.call.resumes:
            self.waiting.add_first(request)
        else:
            self.waiting.add(request)

    def plan(self) -> Batch | None:
        """The next invocation; afterwards every running request has pages for all its tokens.

        Raises IllegalTransitionError for a request that is not what it should be; `discard` it.
        """
        self._grow_running()
        self._admit()
        return self._mode.next_batch(self.running)

    def charge(self, request: Request, tokens: int) -> None:
        """Counts tokens of service for the request's tenant."""
        self._share.charge(request.tenant, tokens)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a request wherever it is and gives its pages back. Raises IllegalTransitionError."""
        place = self.running if request.state is State.RUNNING else self.waiting
        request.finish(reason, self._cache)
        try:
            place.remove(request)
        except ValueError:  # its state was not what it was treated as
            raise IllegalTransitionError(request, State.FINISHED) from None

    def discard(self, request: Request) -> None:
        """Ends a request whatever its state is, right or wrong."""
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        request.discard(self._cache)

    def _grow_running(self) -> None:
        index, has_grown = 0, False
        while index < len(self.running):
            request = self.running[index]
            assert request.lease is not None
            num_pages = len(request.lease.page_ids)
            if self._cache.reserve(request.lease, len(request.tokens)):
                has_grown |= len(request.lease.page_ids) > num_pages
                index += 1
            else:
                self._preempt_youngest()
        if has_grown:
            self._grow_ahead()

    def _grow_ahead(self) -> None:
        """A page ahead for everybody, where a page for each is left after that.

        So block tables change at one step in a page's tokens, and not at another for each request.
        """
        if self._available() < 2 * len(self.running):
            return
        for request in self.running:
            assert request.lease is not None
            most = len(request.call.prompt_ids) + request.call.params.max_tokens
            self._cache.reserve(request.lease, min(len(request.tokens) + self._cache.stride, most))

    def _preempt_youngest(self) -> None:
        assert len(self.running) > 1, "a request larger than the pool was let in"
        victim = self.running[-1]
        victim.preempt(self._cache)
        self.running.pop()
        self.waiting.add_first(victim)
        self.num_preemptions += 1

    def _admit(self) -> None:
        """Starts what fits, in order; one that does not fit is overtaken at most MAX_OVERTAKES times."""
        if not self.waiting or len(self.running) >= self._max_running:
            return
        prefills = [r for r in self.running if r.num_uncomputed > 1]
        blocker: Request | None = None
        misfits = 0
        for request in islice(self.waiting, LOOKAHEAD):
            if request.blocked_at >= self._available():
                blocker = blocker or request  # nothing was freed since it last did not fit
            elif self._is_being_computed(request, prefills) or self._is_one_too_long(request, prefills):
                continue
            elif self._start(request):
                prefills.append(request)
                if blocker is not None:
                    blocker.num_overtakes += 1
            else:
                blocker = blocker or request
                misfits += 1
            overtaken = blocker is not None and blocker.num_overtakes >= MAX_OVERTAKES
            if overtaken or misfits == MAX_MISFITS or len(self.running) >= self._max_running:
                return

    def _is_being_computed(self, request: Request, prefills: list[Request]) -> bool:
        """Whether a running request is about to fill the next page this one would share with it.

        Starting it now would compute that page twice; once it is published, it is found.
        """
        if not self._cache.shares_prefixes:
            return False
        stride = self._cache.stride
        kin = [r for r in prefills if _same_start(r, request, stride)]
        if not kin:
            return False
        end = self._cache.match_length(request.tokens, request.call.cache_salt) + stride
        return end < len(request.tokens) and any(
            r.num_computed < end <= len(r.tokens) and r.tokens[:end] == request.tokens[:end] for r in kin
        )

    def _is_one_too_long(self, request: Request, prefills: list[Request]) -> bool:
        """Whether it would be a long prefill beside as many as there may be."""
        limit = self._options.long_prefill_tokens
        if len(request.tokens) <= limit:
            return False
        if sum(r.num_uncomputed > limit for r in prefills) < self._options.max_long_prefills:
            return False
        cached = self._cache.match_length(request.tokens, request.call.cache_salt)
        return len(request.tokens) - cached > limit

    def _start(self, request: Request) -> bool:
        available = self._available()
        lease = self._cache.acquire(request.tokens, request.call.cache_salt)
        # Each running request may need a page at its next token: leave that many, or the newcomer
        # would be preempted at once.
        if not self._cache.reserve(lease, len(request.tokens)) or (
            self.running and self._available() < len(self.running)
        ):
            self._cache.release(lease)
            request.blocked_at = available
            return False
        try:
            request.start(lease)
        except IllegalTransitionError:
            self._cache.release(lease)
            raise
        if request.last_turn < 0:  # what a preemption costs is not the tenant's affair
            self.charge(request, request.num_uncomputed)
        self.waiting.remove(request)
        self.running.append(request)
        return True

    def _available(self) -> int:
        usage = self._cache.usage()
        return usage.free + usage.cached


def _same_start(one: Request, other: Request, length: int) -> bool:
    return one.call.cache_salt == other.call.cache_salt and one.tokens[:length] == other.tokens[:length]
