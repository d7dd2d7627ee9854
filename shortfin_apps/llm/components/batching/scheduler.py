"""Who runs: the waiting queue, admission to pages, and preemption when they run out.

Pages are claimed as needed. The prompt's pages are reserved when a request starts, one more each time
it grows into a new page; when none is left, the youngest running request goes back to the head of the
queue. The oldest is never preempted for a younger one, and a request that could not run alone is
refused before it gets here, so somebody always makes progress.
"""

from __future__ import annotations

from collections import deque

from shortfin_apps.llm.components.batching.batch import Batch
from shortfin_apps.llm.components.batching.mode import BatchMode
from shortfin_apps.llm.components.kvcache.base import KVCache
from shortfin_apps.llm.components.messages import FinishReason
from shortfin_apps.llm.components.request import Request, State


class Scheduler:
    def __init__(self, cache: KVCache, mode: BatchMode, max_running: int) -> None:
        self._cache = cache
        self._mode = mode
        self._max_running = max_running
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # by admission, oldest first
        self.num_preemptions = 0
        self._blocked: tuple[Request, int] | None = None

    def add(self, request: Request) -> None:
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
        while self.waiting and len(self.running) < self._max_running:
            if not self._start(self.waiting[0]):
                return
            self.running.append(self.waiting.popleft())

    def _start(self, request: Request) -> bool:
        available = self._available()
        if self._blocked is not None and self._blocked[0] is request and available <= self._blocked[1]:
            return False  # nothing was freed since it last did not fit
        lease = self._cache.acquire(request.tokens, request.call.cache_salt)
        # Each running request may need a page at its next token: leave that many, or the newcomer
        # would be preempted at once.
        if self._cache.reserve(lease, len(request.tokens)) and (
            not self.running or self._available() >= len(self.running)
        ):
            request.start(lease)
            self._blocked = None
            return True
        self._cache.release(lease)
        self._blocked = (request, available)
        return False

    def _available(self) -> int:
        usage = self._cache.usage()
        return usage.free + usage.cached
