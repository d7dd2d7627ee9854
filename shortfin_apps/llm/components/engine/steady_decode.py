"""Steady decode: steps of a decode loop that only append a token to each of the same requests.

While a decode loop continues and no request arrives, ends or needs a page, each step would plan the same
batch again. Here, the batch is planned once, together with the number of steps for which the plan holds, and
each step is committed in one pass:

    engine's step     queue n + 1,  wait for n,  append a token to each request

The engine's general path is slower and has the same result. It handles all other steps: if the set of
requests changes, a request may end, or a request has no page for its next token.
"""

from __future__ import annotations

from collections.abc import Sequence

from shortfin_apps.llm.components.batching.scheduler import Scheduler
from shortfin_apps.llm.components.engine.stats import EngineCounters
from shortfin_apps.llm.components.kvcache.cache import KVCache
from shortfin_apps.llm.components.request.messages import Delta
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.contract.abi import NOT_FINITE


class SteadyDecode:
    """The running requests of a decode loop with one step in flight.

    Callers must create this right after a step's commit; each request must have at least one output token.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        scheduler: Scheduler,
        cache: KVCache,
        counters: EngineCounters,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.requests = requests
        self._scheduler = scheduler
        self._cache = cache
        self._counters = counters
        self._membership = scheduler.membership
        self._steps_left = min(_steps_before_change(request, cache.stride) for request in requests)
        self._num_steps = 0
        self._filling = _by_step_that_fills_a_page(requests, cache.stride)
        self._ends = eos_token_ids.union(
            {NOT_FINITE}, *(request.call.params.stop_token_ids for request in requests)
        )

    @property
    def holds(self) -> bool:
        """Whether the step after the one in flight will decode the same requests without new pages."""
        return (
            self._num_steps < self._steps_left
            and self._membership == self._scheduler.membership
            and not self._scheduler.may_admit()
            and not self._cache.has_suspects  # suspect pages can be zeroed only while no step is in flight
        )

    def may_end(self, token_ids: Sequence[int]) -> bool:
        """Return whether one of these tokens may end a request."""
        return not self._ends.isdisjoint(token_ids)

    def commit(self, token_ids: Sequence[int]) -> list[Delta]:
        """Append a token to each request. Callers must check `may_end` first: no token may end a request."""
        for request in self._filling[self._num_steps % self._cache.stride]:
            assert request.lease is not None
            self._cache.publish(request.lease, request.token_ids, request.num_computed + 1)
        self._num_steps += 1
        deltas = []
        for turn, (request, token_id) in enumerate(
            zip(self.requests, token_ids, strict=True), self._counters.tasks + 1
        ):
            request.last_turn = turn
            request.num_computed += 1
            request.token_ids.append(token_id)
            deltas.append(Delta(request.request_id, (token_id,), (), request.num_cached, request.queue_s))
        self._counters.count_decodes(len(deltas))
        if self._scheduler.waiting:
            for request in self.requests:
                self._scheduler.charge(request, 1)
        return deltas


def _steps_before_change(request: Request, stride: int) -> int:
    """Return the steps until the request's last token, or until a step needs another page, if earlier."""
    num_tokens = len(request.token_ids)
    return min(
        request.call.params.max_tokens - 1 - request.num_generated,
        request.num_pages * stride - num_tokens,
    )


def _by_step_that_fills_a_page(requests: Sequence[Request], stride: int) -> list[list[Request]]:
    """Return for each of the next `stride` steps the requests that fill a page; later steps repeat."""
    filling: list[list[Request]] = [[] for _ in range(stride)]
    for request in requests:
        filling[(-request.num_computed - 1) % stride].append(request)
    return filling
