"""The order in which waiting requests start.

1. Preempted requests, and requests that continue an admitted one (the steps of a beam search).
2. Among tenants, the one that has received the least service (fair_share.py).
3. Within one tenant, first come, first served, with an offset for priority: a request is ordered as if it
   had arrived `priority * PRIORITY_STEP_S` seconds later (earlier if negative). A request can therefore be
   overtaken by one with a `priority` value lower by n only within n * PRIORITY_STEP_S seconds of arrival.

The queue is never re-sorted: a request's position within its tenant is fixed when it arrives.
"""

from __future__ import annotations

import heapq
from bisect import insort_right
from collections import Counter, deque
from collections.abc import Iterator

from shortfin_apps.llm.components.batching.fair_share import FairShare
from shortfin_apps.llm.components.request.request import Request

PRIORITY_STEP_S = 10.0


class WaitingQueue:
    """Waiting requests of all tenants, iterated in the order in which they should start."""

    def __init__(self, share: FairShare) -> None:
        self._share = share
        self._first: deque[Request] = deque()
        self._of_tenant: dict[str, list[Request]] = {}  # in order; only tenants with requests here
        self._num_of_tenants = 0

    def __len__(self) -> int:
        return len(self._first) + self._num_of_tenants

    @property
    def num_tenants(self) -> int:
        """Number of tenants with waiting requests, not counting preempted and resumed requests."""
        return len(self._of_tenant)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over requests in order. Callers must not remove any request but the one just yielded.

        If a yielded request stays, its tokens count as service of its tenant for the rest of the iteration,
        so that requests of other tenants follow.
        """
        yield from tuple(self._first)
        turns = [(*self._share.rank(tenant), tenant, 0, 0.0) for tenant in self._of_tenant]
        heapq.heapify(turns)
        while turns:
            _, _, tenant, index, passed = turns[0]
            requests = self._of_tenant[tenant]
            request = requests[index]
            yield request
            if index < len(requests) and requests[index] is request:
                index += 1
                passed += len(request.token_ids) / self._share.weight(tenant)
            if index < len(requests):
                service, entered = self._share.rank(tenant)
                heapq.heapreplace(turns, (service + passed, entered, tenant, index, passed))
            else:
                heapq.heappop(turns)

    def counts(self) -> Counter[str]:
        """Number of waiting requests per tenant."""
        counts = Counter({tenant: len(requests) for tenant, requests in self._of_tenant.items()})
        counts.update(request.tenant for request in self._first)
        return counts

    def add(self, request: Request) -> None:
        tenant = request.tenant
        if tenant not in self._of_tenant:
            self._of_tenant[tenant] = []
            self._share.enter(tenant)
        insort_right(self._of_tenant[tenant], request, key=_virtual_arrival)
        self._num_of_tenants += 1

    def add_first(self, request: Request) -> None:
        """Put a request at the head of the queue."""
        self._first.appendleft(request)

    def remove(self, request: Request) -> None:
        """Remove a request. Raises ValueError if it is not in the queue."""
        if request in self._first:
            self._first.remove(request)
            return
        tenant = request.tenant
        requests = self._of_tenant.get(tenant, [])
        requests.remove(request)
        self._num_of_tenants -= 1
        if not requests:
            del self._of_tenant[tenant]
            self._share.leave(tenant)


def _virtual_arrival(request: Request) -> float:
    return request.arrival_s + request.call.terms.priority * PRIORITY_STEP_S
