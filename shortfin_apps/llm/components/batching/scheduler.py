"""Who runs: the waiting queue, admission to pages, and preemption when they run out.

Pages are claimed as needed. The prompt's pages are reserved when a request starts, one more each time
it grows into a new page; when none is left, the youngest running request goes back to the head of the
queue. The oldest is never preempted for a younger one, and a request that could not run alone is
refused before it gets here, so somebody always makes progress.

A waiting request that does not fit is overtaken by later ones that do, but only so often: then
everybody behind it waits until it has started.
"""

from __future__ import annotations

from collections import deque

from shortfin_apps.llm.components.batching.batch import Batch
from shortfin_apps.llm.components.batching.mode import BatchMode
from shortfin_apps.llm.components.kvcache.base import KVCache
from shortfin_apps.llm.components.messages import FinishReason
from shortfin_apps.llm.components.request import Request, State

MAX_OVERTAKES = 32
LOOKAHEAD = 64  # waiting requests looked at in one step, so that a long queue costs no time


class Scheduler:
    def __init__(self, cache: KVCache, mode: BatchMode, max_running: int) -> None:
        self._cache = cache
        self._mode = mode
        self._max_running = max_running
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # by admission, oldest first
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        if request.call.resumes:
            self.waiting.appendleft(request)
        else:
            self.waiting.append(request)

    def plan(self) -> Batch | None:
        """The next invocation; afterwards every running request has pages for all its tokens."""
        self._grow_running()
        self._admit()
        return self._mode.next_batch(self.running)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a request wherever it is and gives its pages back."""
        if request.state is State.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.finish(reason, self._cache)

    def _grow_running(self) -> None:
        index = 0
        while index < len(self.running):
            request = self.running[index]
            assert request.lease is not None
            if self._cache.reserve(request.lease, len(request.tokens)):
                index += 1
            else:
                self._preempt_youngest()

    def _preempt_youngest(self) -> None:
        assert len(self.running) > 1, "a request larger than the pool was let in"
        victim = self.running.pop()
        victim.preempt(self._cache)
        self.waiting.appendleft(victim)
        self.num_preemptions += 1

    def _admit(self) -> None:
        """Starts what fits, in order; one that does not fit is overtaken at most MAX_OVERTAKES times."""
        blocker: Request | None = None
        index = 0
        while index < min(len(self.waiting), LOOKAHEAD) and len(self.running) < self._max_running:
            request = self.waiting[index]
            if self._is_being_computed(request):
                index += 1
            elif self._start(request):
                del self.waiting[index]
                self.running.append(request)
                if blocker is not None:
                    blocker.num_overtakes += 1
            else:
                blocker = blocker or request
                index += 1
            if blocker is not None and blocker.num_overtakes >= MAX_OVERTAKES:
                return

    def _is_being_computed(self, request: Request) -> bool:
        """Whether a running request is about to fill the next page this one would share with it.

        Starting it now would compute that page twice; once it is published, it is found.
        """
        if not self._cache.shares_prefixes:
            return False
        stride = self._cache.stride
        kin = [r for r in self.running if r.num_uncomputed > 1 and _same_start(r, request, stride)]
        if not kin:
            return False
        end = self._cache.match_length(request.tokens, request.call.cache_salt) + stride
        return end < len(request.tokens) and any(
            r.num_computed < end <= len(r.tokens) and r.tokens[:end] == request.tokens[:end] for r in kin
        )

    def _start(self, request: Request) -> bool:
        available = self._available()
        if available <= request.blocked_at:
            return False  # nothing was freed since it last did not fit
        lease = self._cache.acquire(request.tokens, request.call.cache_salt)
        # Each running request may need a page at its next token: leave that many, or the newcomer
        # would be preempted at once.
        if self._cache.reserve(lease, len(request.tokens)) and (
            not self.running or self._available() >= len(self.running)
        ):
            request.start(lease)
            return True
        self._cache.release(lease)
        request.blocked_at = available
        return False

    def _available(self) -> int:
        usage = self._cache.usage()
        return usage.free + usage.cached


def _same_start(one: Request, other: Request, length: int) -> bool:
    return one.call.cache_salt == other.call.cache_salt and one.tokens[:length] == other.tokens[:length]
