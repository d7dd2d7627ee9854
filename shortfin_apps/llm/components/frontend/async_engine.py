"""The engine's thread, and the event loop's side of it.

    event loop                                engine thread
    submit, abort ── inbox (deque) ─────────> drained before each step
    buffers <────── one call_soon per step ── deltas of the step

Batches, not tokens, cross the border. The thread sleeps on an event when there is no work; while there
is, the event loop looks now and then whether the thread still steps. If it does not, everybody is
answered with an error and nobody is let in until it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.engine.stats import EngineStats
from shortfin_apps.llm.components.frontend.admission import Admission
from shortfin_apps.llm.components.frontend.delta_buffer import DeltaBuffer
from shortfin_apps.llm.components.request.messages import Delta, FinishReason, GenerateCall
from shortfin_apps.llm.errors import (
    InvalidRequestError,
    InvocationError,
    LlmError,
    RequestAbortedError,
    UnavailableError,
)

logger = logging.getLogger(__name__)

STALL_TIMEOUT_S = 60.0
LOOKS_PER_STALL = 10
JOIN_S = 0.1
MAX_CONSECUTIVE_FAILURES = 3
MAX_QUEUE_TOKENS = 131_072
MAX_UNREAD_TOKENS = 512


class _Abort(NamedTuple):
    request_id: str
    error: LlmError | None = None


class _FlushCache:
    """Forget what is only cached."""


Message = GenerateCall | _Abort | _FlushCache


class AsyncEngine:
    """Implements messages.EngineClient over an Engine. `start` it in the loop that will call it.

    `max_requests` bounds what is admitted and not yet answered, `max_queue_tokens` the prompt tokens of
    those that have no first token yet; a beam search is admitted as one, and its later steps may be as
    many as it has beams. A request is aborted when more than `max_unread_tokens` wait for its reader. A
    step that takes longer than `stall_timeout_s` means that the device does not answer; several
    invocations in a row that fail, that it is broken: not healthy until one succeeds. `on_close` runs once,
    when the thread has ended: it releases the device.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_requests: int,
        max_queue_tokens: int = MAX_QUEUE_TOKENS,
        max_unread_tokens: int = MAX_UNREAD_TOKENS,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        on_close: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._admission = Admission(max_requests=max_requests, max_queue_tokens=max_queue_tokens, clock=clock)
        self._max_request_tokens = engine.max_request_tokens
        self._max_unread_tokens = max_unread_tokens
        self._stall_timeout_s = stall_timeout_s
        self._on_close = on_close
        self._clock = clock
        self._inbox: deque[Message] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._draining = False
        self._drained = False  # its time is over: what resumes is aborted, too
        self._turn_began: float | None = None  # None while the thread sleeps
        self._stats = engine.stats()
        self._buffers: dict[str, DeltaBuffer] = {}  # of all that is admitted and not answered
        self._empty = asyncio.Event()
        self._empty.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, call: GenerateCall) -> AsyncGenerator[Delta, None]:
        self._check_available(call.resumes)
        if call.request_id in self._buffers:
            raise InvalidRequestError(f"request id {call.request_id!r} is in use", "rid")
        self._engine.check(call)
        self._admission.enter(call)
        buffer = self._buffers[call.request_id] = DeltaBuffer()
        self._empty.clear()
        self._send(call)
        self._watch_later()
        return self._stream(call.request_id, buffer)

    def abort(self, request_id: str) -> bool:
        if request_id not in self._buffers:
            return False
        self._send(_Abort(request_id))
        return True

    def abort_all(self) -> int:
        return sum([self.abort(request_id) for request_id in self._buffers])

    def flush_cache(self) -> None:
        self._send(_FlushCache())

    def stats(self) -> EngineStats:
        return self._stats

    @property
    def max_requests(self) -> int:
        return self._admission.max_requests

    @property
    def max_queue_tokens(self) -> int:
        return self._admission.max_queue_tokens

    @property
    def max_request_tokens(self) -> int:
        return self._max_request_tokens

    @property
    def ready(self) -> bool:
        return self.healthy and not self._draining

    @property
    def healthy(self) -> bool:
        is_broken = self._stats.failures_in_a_row >= MAX_CONSECUTIVE_FAILURES
        return self._thread.is_alive() and not self._stalled and not is_broken

    async def drain(self, timeout_s: float) -> None:
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._until_empty()
        except TimeoutError:
            self._drained = True
            self.abort_all()
            await self._until_empty()

    async def _until_empty(self) -> None:
        while self._buffers:  # what was answered last may have been one step of several
            await self._empty.wait()

    async def close(self, patience_s: float = math.inf) -> bool:
        """Stops the thread after the step under way and releases the device; ends what is not answered.

        False when the step does not end within `patience_s`, or its device does not answer: the thread is
        left behind in it, and no destructor must run under it.
        """
        self._draining = self._stopping = True
        self._wake.set()
        if self._watch is not None:
            self._watch.cancel()
        give_up_s = self._clock() + patience_s
        await asyncio.to_thread(self._thread.join, JOIN_S)
        while self._thread.is_alive() and not self._stalled and self._clock() < give_up_s:
            await asyncio.to_thread(self._thread.join, JOIN_S)
        self._answer_all(UnavailableError("the server has shut down"))
        return not self._thread.is_alive()

    @property
    def _stalled(self) -> bool:
        began = self._turn_began
        return began is not None and self._clock() - began > self._stall_timeout_s

    def _check_available(self, resumes: bool) -> None:
        if not self._thread.is_alive() or self._stopping or (self._draining and not resumes):
            raise UnavailableError("the server is not taking requests: it is starting or shutting down")
        if self._drained:
            raise RequestAbortedError("the server is shutting down and cannot wait for this request's end")
        if self._stalled:
            raise self._not_answering()

    def _not_answering(self) -> UnavailableError:
        return UnavailableError(f"the device has not answered for more than {self._stall_timeout_s:g} s")

    async def _stream(self, request_id: str, buffer: DeltaBuffer) -> AsyncGenerator[Delta, None]:
        try:
            while True:
                delta = await buffer.get()
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            if self._buffers.get(request_id) is buffer:  # the caller left early
                self.abort(request_id)

    def _send(self, message: Message) -> None:
        self._inbox.append(message)
        self._wake.set()

    def _deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            buffer = self._buffers.get(delta.request_id)
            if buffer is None:
                continue
            was_short = buffer.num_tokens <= self._max_unread_tokens
            buffer.put(delta)
            if delta.token_ids:
                self._admission.prefilled(delta.request_id)
            if delta.finish_reason is not None:
                self._leave(delta.request_id)
            elif was_short and buffer.num_tokens > self._max_unread_tokens:
                # Its reader may only not have had its turn yet: it has it before this call.
                asyncio.get_running_loop().call_soon(self._check_reader, delta.request_id, buffer)

    def _leave(self, request_id: str) -> None:
        """The one place where a request's place is given back."""
        del self._buffers[request_id]
        self._admission.leave(request_id)
        if not self._buffers:
            self._empty.set()

    def _check_reader(self, request_id: str, buffer: DeltaBuffer) -> None:
        if buffer.num_tokens <= self._max_unread_tokens or self._buffers.get(request_id) is not buffer:
            return
        logger.warning("request %s is aborted: its client reads too slowly", request_id)
        reason = f"the client reads too slowly: {buffer.num_tokens} tokens were waiting for it"
        self._send(_Abort(request_id, RequestAbortedError(reason)))

    def _watch_later(self) -> None:
        if self._watch is None:
            delay_s = self._stall_timeout_s / LOOKS_PER_STALL
            self._watch = asyncio.get_running_loop().call_later(delay_s, self._check_stall)

    def _check_stall(self) -> None:
        self._watch = None
        if self._stalled:
            logger.error("the device does not answer; %d requests are ended", len(self._buffers))
            self._answer_all(self._not_answering())
        elif self._buffers:
            self._watch_later()

    def _answer_all(self, error: LlmError) -> None:
        """Ends everything on this side; the engine frees it when it can."""
        for request_id, buffer in list(self._buffers.items()):
            self.abort(request_id)
            buffer.put(Delta(request_id=request_id, finish_reason=FinishReason.ERROR, error=error))
            self._leave(request_id)

    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self._engine.has_work and not self._inbox:
                    self._wake.wait()
                self._work()
        except BaseException:
            logger.critical("the engine's thread has ended", exc_info=True)
            self._turn_began = None
            self._call_soon(self._answer_all, UnavailableError("the engine has stopped; restart the server"))
        finally:
            self._on_close()

    def _work(self) -> None:
        """One turn, and its deltas on their way to the event loop."""
        self._wake.clear()
        self._turn_began = self._clock()
        deltas = self._turn()
        self._turn_began = None
        if deltas:
            self._call_soon(self._deliver, deltas)

    def _turn(self) -> list[Delta]:
        """Takes in what arrived, and steps."""
        deltas: list[Delta] = []
        try:
            self._take_in(deltas)
            deltas += self._engine.step()
        except Exception:
            logger.exception("the engine failed outside an invocation; its requests are ended")
            deltas += self._engine.fail_all(InvocationError("the engine failed; the request was ended"))
        self._stats = self._engine.stats()
        return deltas

    def _take_in(self, deltas: list[Delta]) -> None:
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, GenerateCall):
                self._engine.add(message)
            elif isinstance(message, _FlushCache):
                self._engine.flush_cache()
            elif (delta := self._engine.abort(message.request_id, message.error)) is not None:
                deltas.append(delta)

    def _call_soon(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None, "the thread was started without `start`"
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(function, *arguments)
