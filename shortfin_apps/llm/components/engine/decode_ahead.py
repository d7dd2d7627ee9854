"""Decoding ahead: queue a decode step before the tokens of the previous step have arrived.

    engine's step n       start n,  queue n + 1,  wait for n,  commit n
    engine's step n + 1             queue n + 2,  wait for n + 1,  commit n + 1
    engine's last step              wait for the step in flight,  commit that step

This keeps the device busy while the host commits. It requires a decode loop in the VMFB (abi.py), which
advances tokens and positions on the device, and requests for which the device can sample. No step is
queued ahead if the next batch may differ: if a request is about to reach its `max_tokens`, a waiting request
might start, or tokens would be proposed for a request (speculation.py). A new request therefore waits for at
most one extra step.

A request may end (stop token, abort, deadline, NaN) while a step that computes its next token is in flight.
That token is discarded, because the request no longer runs when the step is committed. The pages of the
request are released immediately, although the step still writes one cache slot of the last page. This is
safe: no batch is planned while a step is in flight, so no other request gets these pages before the step is
over, and later reads are queued after the step. The last page was never shared, because only full pages are
shared. If the discarded row has NaN, the page is zeroed, like the pages of a failed request. Window pages
that are given up at a commit are outside the window of the token in flight.
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

    `queued` counts steps queued ahead; `discarded` counts tokens of such steps for requests that have ended.
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
        """Whether a step is queued ahead and not committed yet; nothing else may run until the commit."""
        return self._loop is not None and self._loop.num_queued > 0

    def batch(self) -> Batch | None:
        """Return the batch of the step in flight, without ended requests; None if no step is in flight."""
        if self._loop is None or not self._loop.num_queued:
            return None
        return decode_batch([request for request in self._loop.requests if request.state is State.RUNNING])

    @property
    def requests(self) -> Sequence[Request]:
        """Requests of the current or last loop; some may have ended."""
        return () if self._loop is None else self._loop.requests

    def go_on(self) -> list[int]:
        """Queue another step, then wait for the one in flight and return its token ID for each request.

        Callers must ensure that all requests of the loop run and have pages for the tokens of both steps.
        Raises InvocationError.
        """
        assert self._loop is not None
        self._loop.queue()
        self.queued += 1
        return self._loop.wait()[0]

    def run(self, batch: Batch) -> list[Drawn] | None:
        """Return the tokens of the step in flight, or run `batch` as a new step and return its tokens.

        Also queues the following step, if that will compute the same requests. Returns None if no decode loop
        can run the batch. Raises InvocationError.
        """
        if not self.in_flight and not self._start(batch):
            return None
        assert self._loop is not None
        if self._goes_on(batch):
            self._loop.queue()
            self.queued += 1
        return self._rows(self._loop, {task.request for task in batch.tasks})

    def abandon(self, *, waits: bool = True) -> None:
        """Wait for the step in flight, ignoring failure, and mark the pages that it wrote for zeroing.

        Callers must set `waits` to False for a lost device: the step is then dropped without waiting, because
        it may never finish. No pages are marked, because the device will compute nothing more.
        """
        loop, self._loop = self._loop, None
        if loop is not None and waits:
            page_ids, window_page_ids = loop.abandon()
            self._cache.suspects.update(page_ids)
            self._cache.window_suspects.update(window_page_ids)

    def _start(self, batch: Batch) -> bool:
        """Start a step that decodes the batch, if a loop can; reuse the last loop if its requests match."""
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
        """Return whether the next step will compute the same requests; if so, reserve their pages for it."""
        assert self._loop is not None
        return (
            len(batch.tasks) == len(self._loop.requests)
            and not self._cache.has_suspects  # suspect pages can be zeroed only while no step is in flight
            and not any(_is_last(task.request) for task in batch.tasks)
            and not (self._speculation is not None and self._speculation.would_propose(self._loop.requests))
            and self._scheduler.reserve_next(len(batch.tasks))
        )

    def _rows(self, loop: DecodeLoop, running: set[Request]) -> list[Drawn]:
        """Wait for the oldest step in flight; return its tokens of the requests in `running`."""
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
    """Create a decode batch with the next token of each request."""
    return Batch(EntryFamily.DECODE, tuple(LlmTaskInput.next_of(request, 1) for request in requests))


def _is_last(request: Request) -> bool:
    """Return whether the request's next token is the last one that `max_tokens` allows."""
    return request.num_generated + 1 >= request.call.params.max_tokens
