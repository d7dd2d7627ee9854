"""Open requests: all that are admitted and not yet answered, each with its place and its buffer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator

from shortfin_apps.llm.components.frontend.admission import Admission
from shortfin_apps.llm.components.frontend.delta_buffer import DeltaBuffer
from shortfin_apps.llm.components.request.messages import Delta, FinishReason, GenerateCall
from shortfin_apps.llm.errors import LlmError, RequestAbortedError

logger = logging.getLogger(__name__)


class OpenRequests:
    """Used by the event loop's thread alone. Iterates over request ids.

    `abort` asks the engine to end a request: when its reader has left, when more than `max_unread_tokens`
    wait for it, and when it is answered here.
    """

    def __init__(
        self, admission: Admission, *, max_unread_tokens: int, abort: Callable[[str, LlmError | None], None]
    ) -> None:
        self._admission = admission
        self._max_unread_tokens = max_unread_tokens
        self._abort = abort
        self._buffers: dict[str, DeltaBuffer] = {}
        self._none_left = asyncio.Event()
        self._none_left.set()

    def __len__(self) -> int:
        return len(self._buffers)

    def __iter__(self) -> Iterator[str]:
        return iter(self._buffers)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._buffers

    def admit(self, call: GenerateCall) -> AsyncGenerator[Delta, None]:
        """Takes a place and returns the request's stream. Raises OverloadedError."""
        self._admission.enter(call)
        buffer = self._buffers[call.request_id] = DeltaBuffer()
        self._none_left.clear()
        return self._stream(call.request_id, buffer)

    def deliver(self, deltas: list[Delta]) -> None:
        """Hands one step's deltas to their readers."""
        for delta in deltas:
            if (buffer := self._buffers.get(delta.request_id)) is not None:
                self._put(buffer, delta)

    def answer_all(self, error: LlmError) -> None:
        """Ends everything on this side; the engine frees it when it can."""
        for request_id, buffer in list(self._buffers.items()):
            self._abort(request_id, None)
            buffer.put(Delta(request_id=request_id, finish_reason=FinishReason.ERROR, error=error))
            self._leave(request_id)

    async def until_none_left(self) -> None:
        while self._buffers:  # the last answer may have been one step of a beam search
            await self._none_left.wait()

    async def _stream(self, request_id: str, buffer: DeltaBuffer) -> AsyncGenerator[Delta, None]:
        try:
            while True:
                delta = await buffer.get()
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            if self._buffers.get(request_id) is buffer:  # the caller left early
                self._abort(request_id, None)

    def _put(self, buffer: DeltaBuffer, delta: Delta) -> None:
        was_short = buffer.num_tokens <= self._max_unread_tokens
        buffer.put(delta)
        if delta.token_ids:
            self._admission.prefilled(delta.request_id)
        if delta.finish_reason is not None:
            self._leave(delta.request_id)
        elif was_short and buffer.num_tokens > self._max_unread_tokens:
            # The reader may only be waiting for its turn in the loop: this call comes after it.
            asyncio.get_running_loop().call_soon(self._check_reader, delta.request_id, buffer)

    def _check_reader(self, request_id: str, buffer: DeltaBuffer) -> None:
        if buffer.num_tokens <= self._max_unread_tokens or self._buffers.get(request_id) is not buffer:
            return
        logger.warning("request %s is aborted: its client reads too slowly", request_id)
        reason = f"the client reads too slowly: {buffer.num_tokens} tokens were waiting for it"
        self._abort(request_id, RequestAbortedError(reason))

    def _leave(self, request_id: str) -> None:
        """Gives the request's place back; nothing else does."""
        del self._buffers[request_id]
        self._admission.leave(request_id)
        if not self._buffers:
            self._none_left.set()
