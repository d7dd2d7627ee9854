"""Decoding ahead: queue a decode step before the tokens of the previous step have arrived.

    engine's step n       start n,  queue n + 1,  wait for n,  commit n
    engine's step n + 1             queue n + 2,  wait for n + 1,  commit n + 1
    ...                             wait for the last,  commit it

This keeps the device busy while the host commits. It needs one of the VMFB's decode loops (`abi.py`), which
advance tokens and positions on the device, and requests that the device can sample for. Nothing is queued
ahead if the next batch may differ: when a request is about to reach its `max_tokens`, a waiting request might
start, or tokens would be proposed for a request (speculation.py). A new request therefore waits for at most
one extra step.

A request may end (stop token, abort, deadline, NaN) while a step that computes another token for it is in
flight. That token is discarded, because the request no longer runs when the step is committed. Its pages are
released immediately, although the step still writes one slot of its last page. This is safe: nothing is
planned while a step is in flight, so no other request gets these pages before the step is over, and later
reads are queued after it. The last page was never shared, as only full pages are. If the discarded row is
NaN, the page is cleared, like the pages of a failed request. The token in flight does not see window pages
given up at a commit.
"""

from __future__ import annotations

from collections.abc import Sequence

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.batching.scheduler import Scheduler
from shortfin_apps.llm.components.engine.speculation import Speculation
from shortfin_apps.llm.components.invocation.batch_runner import BatchRunner
from shortfin_apps.llm.components.invocation.decode_loop import DecodeLoop
from shortfin_apps.llm.components.kvcache.cache import KVCache
from shortfin_apps.llm.components.request.request import Request, State
from shortfin_apps.llm.components.sampling.candidates import Drawn
from shortfin_apps.llm.components.sampling.sampler import Sampler
from shortfin_apps.llm.contract.abi import EntryFamily


class DecodeAhead:
    """Runs decode batches on a decode loop, one step ahead while the set of requests stays the same.

    `queued` counts steps queued ahead; `discarded` counts their tokens for requests that had already ended.
    """

    def __init__(
        self,
        runner: BatchRunner,
        scheduler: Scheduler,
        sampler: Sampler,
        cache: KVCache,
        speculation: Speculation | None = None,
    ) -> None:
        self._runner = runner
        self._speculation = speculation
        self._scheduler = scheduler
        self._sampler = sampler
        self._cache = cache
        self._loop: DecodeLoop | None = None
        self.queued = self.discarded = 0

    @property
    def in_flight(self) -> bool:
        """Whether a step was queued ahead and is not committed yet; nothing else may run until then."""
        return self._loop is not None and self._loop.num_queued > 0

    def batch(self) -> Batch | None:
        """The step in flight, without requests that have ended since; None if no step is in flight."""
        if self._loop is None or not self._loop.num_queued:
            return None
        return decode_batch([request for request in self._loop.requests if request.state is State.RUNNING])

    @property
    def requests(self) -> Sequence[Request]:
        """Requests of the last loop; some may have ended since."""
        return () if self._loop is None else self._loop.requests

    def go_on(self) -> list[int]:
        """Queue another step, then wait for the one in flight and return one token ID per request.

        All requests of the loop must be running and have pages for both steps. Raises InvocationError.
        """
        assert self._loop is not None
        self._loop.queue()
        self.queued += 1
        return self._loop.wait()[0]

    def run(self, batch: Batch) -> list[Drawn] | None:
        """Return the tokens of the step in flight or of a new batch; None if the batch does not suit a loop.

        Also queues the following step if it will compute the same requests. Raises InvocationError.
        """
        if not self.in_flight and not self._start(batch):
            return None
        assert self._loop is not None
        if self._goes_on(batch):
            self._loop.queue()
            self.queued += 1
        return self._rows(self._loop, {task.request for task in batch.tasks})

    def abandon(self, *, waits: bool = True) -> None:
        """Wait for the step in flight, ignoring failure, and mark the pages that it wrote for clearing.

        With `waits` false, drop it without waiting: a lost device may never finish, and computes nothing
        more.
        """
        loop, self._loop = self._loop, None
        if loop is not None and waits:
            page_ids, window_page_ids = loop.abandon()
            self._cache.suspects.update(page_ids)
            self._cache.window_suspects.update(window_page_ids)

    def _start(self, batch: Batch) -> bool:
        """Start a step that decodes the batch, reusing the last loop if it has the same requests."""
        if not all(
            len(task.token_ids) == 1 and task.completes and not task.num_ahead for task in batch.tasks
        ):
            return False
        requests = [task.request for task in batch.tasks]
        if self._loop is None or not self._loop.is_at(requests):
            if not all(map(self._sampler.suits_device, requests)):
                return False
            sampling = [self._sampler.device_fields(request) for request in requests]
            self._loop = self._runner.start_loop(batch, sampling)
        if self._loop is not None:
            self._loop.queue()
        return self._loop is not None

    def _goes_on(self, batch: Batch) -> bool:
        """Whether the next step will compute the same requests; if so, its pages are reserved."""
        assert self._loop is not None
        return (
            len(batch.tasks) == len(self._loop.requests)
            and not self._cache.has_suspects  # suspect pages are cleared while nothing is in flight
            and not any(_is_last(task.request) for task in batch.tasks)
            and not (self._speculation is not None and self._speculation.would_propose(self._loop.requests))
            and self._scheduler.reserve_next(len(batch.tasks))
        )

    def _rows(self, loop: DecodeLoop, running: set[Request]) -> list[Drawn]:
        """Wait for the oldest step in flight, and return its rows for the requests that still run."""
        rows = []
        token_ids, page_ids, window_page_ids = loop.wait()
        for row, (request, token_id) in enumerate(zip(loop.requests, token_ids, strict=True)):
            if request in running:
                rows.append(Drawn(token_id))
                continue
            self.discarded += 1
            if not Drawn(token_id).is_finite:
                self._cache.suspects.add(page_ids[row])
                self._cache.window_suspects.update(window_page_ids[row : row + 1])
        return rows


def decode_batch(requests: Sequence[Request]) -> Batch:
    """A decode batch with the next token of each request."""
    return Batch(EntryFamily.DECODE, tuple(LlmTaskInput.next_of(request, 1) for request in requests))


def _is_last(request: Request) -> bool:
    """Whether the request's next token is the last that `max_tokens` allows."""
    return request.num_generated + 1 >= request.call.params.max_tokens
