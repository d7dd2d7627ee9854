"""The order in which waiting requests start.

1. Those that were set back (preempted), and the next steps of what was admitted before.
2. Among tenants, the one that has had the least service (fair_share.py).
3. Among one tenant's requests, first come first served, with priorities that age: a request counts as
   if it had come `priority * PRIORITY_STEP_S` seconds later (or earlier, when negative). So one of a
   priority lower by n is overtaken by what comes at most n steps after it, and by nothing later.

Nothing is ever sorted anew: a request's place among its tenant's is fixed when it comes.
"""

from __future__ import annotations

import heapq
from bisect import insort_right
from collections import deque
from collections.abc import Iterator

from shortfin_apps.llm.components.batching.fair_share import FairShare
from shortfin_apps.llm.components.request.request import Request

PRIORITY_STEP_S = 10.0


class WaitingQueue:
    def __init__(self, share: FairShare) -> None:
        self._share = share
        self._first: deque[Request] = deque()
        self._lines: dict[str, list[Request]] = {}  # of each tenant that waits, in order
        self._num_in_lines = 0

    def __len__(self) -> int:
        return len(self._first) + self._num_in_lines

    def __iter__(self) -> Iterator[Request]:
        """In order; the request that was yielded last, and no other, may be removed meanwhile.

        A tenant whose request stays is passed over as if it had been served.
        """
        yield from tuple(self._first)
        turns = [(*self._share.rank(tenant), tenant, 0, 0.0) for tenant in self._lines]
        heapq.heapify(turns)
        while turns:
            _, _, tenant, index, passed = turns[0]
            line = self._lines[tenant]
            request = line[index]
            yield request
            if index < len(line) and line[index] is request:
                index += 1
                passed += len(request.tokens) / self._share.weight(tenant)
            if index < len(line):
                service, entered = self._share.rank(tenant)
                heapq.heapreplace(turns, (service + passed, entered, tenant, index, passed))
            else:
                heapq.heappop(turns)

    def add(self, request: Request) -> None:
        tenant = request.tenant
        if tenant not in self._lines:
            self._lines[tenant] = []
            self._share.enter(tenant)
        insort_right(self._lines[tenant], request, key=_virtual_arrival)
        self._num_in_lines += 1

    def add_first(self, request: Request) -> None:
        """Before everybody else."""
        self._first.appendleft(request)

    def remove(self, request: Request) -> None:
        """Raises ValueError when it does not wait here."""
        if request in self._first:
            self._first.remove(request)
            return
        tenant = request.tenant
        line = self._lines.get(tenant, [])
        line.remove(request)
        self._num_in_lines -= 1
        if not line:
            del self._lines[tenant]
            self._share.leave(tenant)


def _virtual_arrival(request: Request) -> float:
    return request.arrival_s + request.call.terms.priority * PRIORITY_STEP_S
