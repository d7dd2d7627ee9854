"""Admitted and not yet answered requests, and their end when the server stops (draining)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial

from shortfin_apps.llm.components.request.messages import Delta, FinishReason, GenerateCall
from shortfin_apps.llm.contract.errors import LlmError, RequestAbortedError, UnavailableError
from shortfin_apps.llm.serving.frontend.admission import Admission
from shortfin_apps.llm.serving.frontend.delta_stream import DeltaStream

logger = logging.getLogger(__name__)


class OpenRequests:
    """All open requests; iterating yields the request ids. Only the event loop's thread uses this.

    `abort` must ask the engine to end a request. It is called when the reader has closed the stream, when
    more than `max_unread_tokens` are queued for the reader, and for every request in `answer_all`.
    """

    def __init__(
        self, admission: Admission, *, max_unread_tokens: int, abort: Callable[[str, LlmError | None], None]
    ) -> None:
        self._admission = admission
        self._max_unread_tokens = max_unread_tokens
        self._abort = abort
        self._streams: dict[str, DeltaStream] = {}
        self._none_left = asyncio.Event()
        self._none_left.set()

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[str]:
        return iter(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def admit(self, call: GenerateCall) -> DeltaStream:
        """Reserve a slot and return the request's stream. Raises OverloadedError."""
        self._admission.enter(call)
        stream = self._streams[call.request_id] = DeltaStream(partial(self._abort, call.request_id, None))
        self._none_left.clear()
        return stream

    def deliver(self, deltas: list[Delta]) -> None:
        """Pass one step's deltas to their readers."""
        for delta in deltas:
            if (stream := self._streams.get(delta.request_id)) is not None:
                self._put(stream, delta)

    def answer_all(self, error: LlmError) -> None:
        """Answer all requests with `error` at once; the engine frees the requests' resources when it can."""
        for request_id, stream in list(self._streams.items()):
            self._abort(request_id, None)
            stream.put(Delta(request_id=request_id, finish_reason=FinishReason.ERROR, error=error))
            self._leave(request_id)

    async def until_none_left(self) -> None:
        while self._streams:  # after one step of a beam search, the next step may have been admitted
            await self._none_left.wait()

    def _put(self, stream: DeltaStream, delta: Delta) -> None:
        was_short = stream.num_tokens <= self._max_unread_tokens
        stream.put(delta)
        if delta.token_ids:
            self._admission.prefilled(delta.request_id)
        if delta.finish_reason is not None:
            self._leave(delta.request_id)
        elif was_short and stream.num_tokens > self._max_unread_tokens:
            # The reader may only be waiting for its turn in the loop; this callback runs after it.
            asyncio.get_running_loop().call_soon(self._check_reader, delta.request_id, stream)

    def _check_reader(self, request_id: str, stream: DeltaStream) -> None:
        if stream.num_tokens <= self._max_unread_tokens or self._streams.get(request_id) is not stream:
            return
        logger.warning("request %s is aborted: its client reads too slowly", request_id)
        reason = f"the client reads too slowly: {stream.num_tokens} tokens were waiting for it"
        self._abort(request_id, RequestAbortedError(reason))

    def _leave(self, request_id: str) -> None:
        """Release the request's slot. Only this method releases slots."""
        del self._streams[request_id]
        self._admission.leave(request_id)
        if not self._streams:
            self._none_left.set()


class Draining:
    """Tracks whether requests are still accepted. `abort_all` must abort all of `requests`."""

    def __init__(self, requests: OpenRequests, abort_all: Callable[[], object]) -> None:
        self._requests = requests
        self._abort_all = abort_all
        self.has_begun = False
        self._is_over = False  # the timeout has passed: calls that resume are refused, too

    def begin(self) -> None:
        """Refuse new requests from now on, but not calls that resume (next steps of a beam search)."""
        self.has_begun = True

    def check(self, resumes: bool) -> None:
        """Raise UnavailableError for a new request while draining; RequestAbortedError after the timeout."""
        if self.has_begun and not resumes:
            raise UnavailableError("the server is not taking requests: it is starting or shutting down")
        if self._is_over:
            raise RequestAbortedError("the server is shutting down and cannot wait for this request's end")

    async def drain(self, timeout_s: float) -> None:
        """Wait until all requests have ended; abort the remaining ones after `timeout_s`."""
        self.begin()
        try:
            async with asyncio.timeout(timeout_s):
                await self._requests.until_none_left()
        except TimeoutError:
            self._is_over = True
            self._abort_all()
            await self._requests.until_none_left()
