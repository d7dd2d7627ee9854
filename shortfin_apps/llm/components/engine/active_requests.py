"""An engine's requests, from `add` until the last delta of each request."""

from __future__ import annotations

import logging

from shortfin_apps.llm.components.batching.scheduler import Scheduler
from shortfin_apps.llm.components.request.messages import Delta, FinishReason
from shortfin_apps.llm.components.request.request import IllegalTransitionError, Request
from shortfin_apps.llm.contract.errors import InvocationError, LlmError

logger = logging.getLogger(__name__)


class ActiveRequests:
    """Waiting and running requests, with their deadlines. Methods that end a request return its last delta.

    If a request makes an illegal lifecycle transition, this raises if `strict`, else only that request ends.
    """

    def __init__(self, scheduler: Scheduler, *, strict: bool) -> None:
        self._scheduler = scheduler
        self._strict = strict
        self._requests: dict[str, Request] = {}
        self._deadlines_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        if (timeout_s := request.call.terms.timeout_s) is not None:
            self._deadlines_s[request.request_id] = request.arrival_s + timeout_s
        self._scheduler.add(request)

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def late(self, now_s: float) -> list[Request]:
        """Return the requests that are past their deadline."""
        return [self._requests[name] for name, deadline_s in self._deadlines_s.items() if deadline_s <= now_s]

    def finish(self, request: Request, last: Delta) -> Delta:
        """Free the pages of a completed request and remove the request; return its last delta."""
        assert last.finish_reason is not None
        try:
            self._scheduler.finish(request, last.finish_reason)
        except IllegalTransitionError as bug:
            last = last._replace(finish_reason=FinishReason.ERROR, error=self._discard(bug))
        self._forget(request)
        return last

    def end(self, request: Request, reason: FinishReason, error: LlmError | None) -> Delta:
        """End a request before its output is complete; return its last delta."""
        last = Delta(
            request_id=request.request_id,
            num_cached_tokens=request.num_cached,
            queue_s=request.queue_s,
            computed=request.take_computed(),
            finish_reason=reason,
            error=error,
        )
        return self.finish(request, last)

    def contain(self, bug: IllegalTransitionError) -> Delta | None:
        """End the request that made an illegal transition; None if its last delta was already returned."""
        request, error = bug.request, self._discard(bug)
        if self._requests.get(request.request_id) is not request:
            return None
        self._forget(request)
        return _failed(request, error)

    def discard_all(self, error: LlmError) -> list[Delta]:
        """End every request in any state, and mark its pages for zeroing."""
        requests = list(self._requests.values())
        self._requests.clear()
        self._deadlines_s.clear()
        for request in requests:
            request.suspect_pages()
            self._scheduler.discard(request)
        return [_failed(request, error) for request in requests]

    def _forget(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._deadlines_s.pop(request.request_id, None)

    def _discard(self, bug: IllegalTransitionError) -> LlmError:
        """Discard the request of an illegal transition and return its error. Raises `bug` if `strict`."""
        if self._strict:
            raise bug
        logger.error("a request left its lifecycle and is ended; please report this bug", exc_info=bug)
        self._scheduler.discard(bug.request)
        return InvocationError("the engine lost track of this request and ended it")


def _failed(request: Request, error: LlmError) -> Delta:
    return Delta(request_id=request.request_id, finish_reason=FinishReason.ERROR, error=error)
