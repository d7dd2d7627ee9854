"""The engine's thread, and the event loop's side of it.

    event loop                                engine thread
    submit, abort ── inbox (deque) ─────────> drained before each step
    streams <────── one call_soon per step ── deltas of the step

Batches, not tokens, cross the border. The thread sleeps on an event when there is no work; nothing
polls.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable

from shortfin_apps.llm.components.engine import Engine
from shortfin_apps.llm.components.messages import Delta, EngineStats, GenerateCall
from shortfin_apps.llm.errors import (
    InvalidRequestError,
    InvocationError,
    OverloadedError,
    UnavailableError,
)

logger = logging.getLogger(__name__)

STALL_TIMEOUT_S = 60.0


class FlushCache:
    """Tells the engine's thread to forget what is only cached."""


Message = GenerateCall | str | FlushCache  # a request, the id of one to abort, or that


class AsyncEngine:
    """Implements messages.EngineClient over an Engine. `start` it in the loop that will call it.

    `max_requests` bounds what is admitted and not yet answered; a beam search is admitted as one, and
    its later steps may be as many as it has beams. `on_close` runs once, when the thread
    has ended: it releases the device.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_requests: int,
        on_close: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self.max_requests = max_requests
        self._max_request_tokens = engine.max_request_tokens
        self._on_close = on_close
        self._clock = clock
        self._inbox: deque[Message] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._draining = False
        self._turn_began: float | None = None  # None while the thread sleeps
        self._stats = engine.stats()
        self._streams: dict[str, asyncio.Queue[Delta]] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, call: GenerateCall) -> AsyncGenerator[Delta, None]:
        if not (self.ready or (call.resumes and self._thread.is_alive() and not self._stopping)):
            raise UnavailableError("the server is not taking requests: it is starting or shutting down")
        if call.request_id in self._streams:
            raise InvalidRequestError(f"request id {call.request_id!r} is in use", "rid")
        self._engine.check(call)
        if len(self._streams) >= self.max_requests and not call.resumes:
            raise OverloadedError(f"{len(self._streams)} requests are already queued or running")
        queue: asyncio.Queue[Delta] = asyncio.Queue()
        self._streams[call.request_id] = queue
        self._empty.clear()
        self._send(call)
        return self._stream(call.request_id, queue)

    def abort(self, request_id: str) -> bool:
        if request_id not in self._streams:
            return False
        self._send(request_id)
        return True

    def abort_all(self) -> int:
        return sum(self.abort(request_id) for request_id in list(self._streams))

    def flush_cache(self) -> None:
        self._send(FlushCache())

    def stats(self) -> EngineStats:
        return self._stats

    @property
    def max_request_tokens(self) -> int:
        return self._max_request_tokens

    @property
    def ready(self) -> bool:
        return self._thread.is_alive() and not self._draining

    @property
    def healthy(self) -> bool:
        began = self._turn_began
        stalled = began is not None and self._clock() - began > STALL_TIMEOUT_S
        return self._thread.is_alive() and not stalled

    async def drain(self, timeout_s: float) -> None:
        self._draining = True
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            for request_id in list(self._streams):
                self.abort(request_id)
            await self._empty.wait()

    async def close(self) -> None:
        """Stops the thread after the step under way and releases the device."""
        self._draining = self._stopping = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)

    async def _stream(self, request_id: str, queue: asyncio.Queue[Delta]) -> AsyncGenerator[Delta, None]:
        try:
            while True:
                delta = await queue.get()
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self.abort(request_id)  # known no more, unless the caller left early

    def _send(self, message: Message) -> None:
        self._inbox.append(message)
        self._wake.set()

    def _deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            queue = self._streams.get(delta.request_id)
            if queue is None:
                continue
            queue.put_nowait(delta)
            if delta.finish_reason is not None:
                del self._streams[delta.request_id]
        if not self._streams:
            self._empty.set()

    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self._engine.has_work and not self._inbox:
                    self._wake.wait()
                self._wake.clear()
                self._turn_began = self._clock()
                deltas = self._turn()
                self._turn_began = None
                if deltas and self._loop is not None:
                    self._loop.call_soon_threadsafe(self._deliver, deltas)
        finally:
            self._on_close()

    def _turn(self) -> list[Delta]:
        """Takes in what arrived, and steps."""
        deltas: list[Delta] = []
        try:
            deltas += self._take_in()
            deltas += self._engine.step()
        except Exception:
            logger.exception("the engine failed outside an invocation; its requests are ended")
            deltas += self._engine.fail_all(InvocationError("the engine failed; the request was ended"))
        self._stats = self._engine.stats()
        return deltas

    def _take_in(self) -> list[Delta]:
        deltas = []
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, GenerateCall):
                self._engine.add(message)
            elif isinstance(message, FlushCache):
                self._engine.flush_cache()
            elif (delta := self._engine.abort(message)) is not None:
                deltas.append(delta)
        return deltas
