"""The engine's interface for the event loop: admits requests, streams their deltas, drains and closes.

The engine itself runs in its own thread (engine_thread.py). The event loop checks periodically that this
thread makes progress (stall_watch.py). During a stall, every request is answered with an error and none is
admitted.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.engine.snapshot import Snapshot
from shortfin_apps.llm.components.engine.stats import EngineStats
from shortfin_apps.llm.components.recorder.dumps import Dumps, WrittenDump
from shortfin_apps.llm.components.recorder.records import LastLaunch
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.contract.errors import InvalidRequestError, InvocationError, LlmError, UnavailableError
from shortfin_apps.llm.serving.frontend.admission import Admission
from shortfin_apps.llm.serving.frontend.delta_stream import DeltaStream
from shortfin_apps.llm.serving.frontend.engine_thread import (
    Abort,
    EngineThread,
    FlushCache,
    IdleTest,
    Look,
)
from shortfin_apps.llm.serving.frontend.open_requests import Draining, OpenRequests
from shortfin_apps.llm.serving.frontend.stall_watch import StallWatch

logger = logging.getLogger(__name__)

JOIN_INTERVAL_S = 0.1
MAX_CONSECUTIVE_FAILURES = 3
MAX_QUEUE_TOKENS = 131_072
MAX_UNREAD_TOKENS = 512
STALL_TIMEOUT_S = 60.0


class AsyncEngine:
    """Implements EngineClient over an Engine. Callers must call `start` in the event loop of all other calls.

    `max_requests` limits the requests admitted and not yet answered. `max_queue_tokens` limits the prompt
    tokens of requests without a first token. A beam search is admitted as one request; its later steps may
    use one request per beam. A request is aborted when more than `max_unread_tokens` are queued for its
    reader.

    The engine is unhealthy while a step takes longer than `stall_timeout_s` (the device does not answer) and
    after MAX_CONSECUTIVE_FAILURES failed invocations in a row, until one succeeds. After DeviceLostError or a
    failed `idle_test`, the engine stays unhealthy and accepts no requests. The engine is lost, which
    `until_lost` waits for, after DeviceLostError, after a step of GIVE_UP_STALLS times the stall timeout, and
    when its thread has ended because of a bug. `on_close` is called once by the
    engine's thread, at its end, and must release the device. `dumps` writes the contents of the engine's
    flight recorder, if there is one.
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
        dumps: Dumps | None = None,
        clock: Callable[[], float] = time.monotonic,
        idle_test: IdleTest | None = None,
    ) -> None:
        self._engine = engine
        self._dumps = dumps
        self._asked_dumps = None if dumps is None else JoinedDumps(dumps)
        self._clock = clock
        self._max_request_tokens = engine.max_request_tokens
        self._admission = Admission(max_requests=max_requests, max_queue_tokens=max_queue_tokens, clock=clock)
        self._requests = OpenRequests(
            self._admission, max_unread_tokens=max_unread_tokens, abort=self._send_abort
        )
        self._thread = EngineThread(
            engine,
            on_deltas=self._requests.deliver,
            on_lost=self._lose,
            on_death=self._answer_dead,
            on_close=on_close,
            clock=clock,
            idle_test=idle_test,
        )
        self._stalls = StallWatch(
            self._thread, stall_timeout_s, on_stall=self._answer_stalled, on_hang=self._lose
        )
        self._loss: str | None = None  # why the engine is lost
        self._lost = asyncio.Event()
        self._looks = Looks(self._thread)
        self._draining = Draining(self._requests, self.abort_all)

    def start(self) -> None:
        self._thread.start()
        self._stalls.start()

    async def submit(self, call: GenerateCall) -> DeltaStream:
        return self.admit(call)

    def admit(self, call: GenerateCall) -> DeltaStream:
        """Do what `submit` does, without `await`: admission waits for nothing in this process."""
        self._check_available(call.resumes)
        if call.request_id in self._requests:
            raise InvalidRequestError(f"request id {call.request_id!r} is in use", "rid")
        self._engine.check(call)
        stream = self._requests.admit(call)
        self._thread.send(call)
        return stream

    def abort(self, request_id: str, error: LlmError | None = None) -> bool:
        if request_id not in self._requests:
            return False
        self._send_abort(request_id, error)
        return True

    def abort_all(self) -> int:
        return sum([self.abort(request_id) for request_id in self._requests])

    def flush_cache(self) -> None:
        self._thread.send(FlushCache())

    async def dump(self, reason: str) -> WrittenDump:
        if self._asked_dumps is None:
            raise InvalidRequestError(
                "there is no flight recorder to dump; start the server without `--dump-dir off`"
            )
        return await self._asked_dumps.write(reason)

    def stats(self) -> EngineStats:
        return replace(self._thread.stats, queue_tokens=self._admission.num_tokens)

    async def snapshot(self, after: int = 0) -> Snapshot:
        return await self._looks.look(after)

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
    def returns_logits(self) -> bool:
        return self._engine.returns_logits

    @property
    def ready(self) -> bool:
        return self.healthy and not self._draining.has_begun

    @property
    def healthy(self) -> bool:
        return self.problem is None

    @property
    def problem(self) -> str | None:
        stats = self.stats()
        if (broken := stats.lost_device or stats.failed_self_test) is not None:
            return broken
        if not self._thread.is_alive:
            return "the engine's thread does not run"
        if self._stalls.stalled:
            return str(self._stalls.error())
        if (num_failures := stats.consecutive_failures) >= MAX_CONSECUTIVE_FAILURES:
            return f"the last {num_failures} invocations have failed"
        return None

    async def until_lost(self) -> str:
        """Wait until the engine is lost for good, which a new process alone can change; return the reason."""
        await self._lost.wait()
        assert self._loss is not None, "it is set first"
        return self._loss

    def last_dump(self, reason: str) -> LastLaunch | None:
        """Write a dump of the loss, if none was written; return the launch at which the device stopped.

        Blocks; may be called in any thread. Returns None without a flight recorder.
        """
        return None if self._dumps is None else self._dumps.write_last(reason)

    async def drain(self, timeout_s: float) -> None:
        await self._draining.drain(timeout_s)

    async def close(self, patience_s: float = math.inf) -> bool:
        """Stop the thread after the current step, release the device and end all unanswered requests.

        Returns False if the step does not end within `patience_s` or the device does not answer. The thread
        is then still running, and callers must not let destructors run for objects that the thread uses.
        """
        self._draining.begin()
        self._thread.stop()
        self._stalls.stop()
        give_up_s = self._clock() + patience_s
        await asyncio.to_thread(self._thread.join, JOIN_INTERVAL_S)
        while self._thread.is_alive and not self._stalls.stalled and self._clock() < give_up_s:
            await asyncio.to_thread(self._thread.join, JOIN_INTERVAL_S)
        self._requests.answer_all(UnavailableError("the server has shut down"))
        self._looks.end()
        return not self._thread.is_alive

    def _check_available(self, resumes: bool) -> None:
        if not self._thread.is_alive or self._thread.is_stopping:
            raise UnavailableError("the server is not taking requests: it is starting or shutting down")
        self._stalls.check_available()
        stats = self.stats()
        if (broken := stats.lost_device or stats.failed_self_test) is not None:
            raise UnavailableError(broken)
        self._draining.check(resumes)

    def _send_abort(self, request_id: str, error: LlmError | None = None) -> None:
        self._thread.send(Abort(request_id, error))

    def _answer_stalled(self, error: UnavailableError) -> None:
        logger.error("the device does not answer; %d requests are ended", len(self._requests))
        self._dump_soon(str(error))
        self._requests.answer_all(error)

    def _dump_soon(self, reason: str) -> None:
        if self._dumps is not None:
            self._dumps.write_soon(reason)

    def _lose(self, reason: str) -> None:
        if self._loss is None:
            self._loss = reason
            self._lost.set()

    def _answer_dead(self) -> None:
        self._dump_soon("the engine's thread has ended")
        self._lose("the engine's thread has ended")
        self._requests.answer_all(UnavailableError("the engine has stopped; restart the server, then retry"))
        self._looks.end()


class Looks:
    """Pending snapshot requests. Only the event loop's thread uses this."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self._waiting: set[asyncio.Future[Snapshot | None]] = set()

    async def look(self, after: int) -> Snapshot:
        """Return a snapshot as of the end of the current step. Raises UnavailableError without a thread."""
        if not self._thread.is_alive or self._thread.is_stopping:
            raise _ended()
        answer: asyncio.Future[Snapshot | None] = asyncio.get_running_loop().create_future()
        self._waiting.add(answer)
        self._thread.send(Look(after, lambda snapshot: _give(answer, snapshot)))
        try:
            snapshot = await answer
        finally:
            self._waiting.discard(answer)
        if snapshot is None:
            raise InvocationError("no snapshot of the engine could be taken; the server's log says why")
        return snapshot

    def end(self) -> None:
        """Fail the pending snapshot requests, because the thread no longer answers them."""
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(_ended())


def _give(answer: asyncio.Future[Snapshot | None], snapshot: Snapshot | None) -> None:
    if not answer.done():  # the caller may have been cancelled
        answer.set_result(snapshot)


def _ended() -> UnavailableError:
    return UnavailableError("there is nothing to see: the engine has ended; restart the server")


class JoinedDumps:
    """Writes dumps for callers on an event loop, one at a time.

    Each caller gets a dump that starts after the call; waiting callers with the same reason share a dump.
    A flood of calls thus neither occupies the threads that other work needs, nor causes its first dumps to
    be deleted before they are read.
    """

    def __init__(self, dumps: Dumps) -> None:
        self._dumps = dumps
        self._writing = asyncio.Lock()
        self._waiting: dict[str, asyncio.Task[WrittenDump]] = {}  # not started yet, by reason

    async def write(self, reason: str) -> WrittenDump:
        """Write a dump, or wait for one with the same `reason` that has not started yet. Raises DumpError."""
        task = self._waiting.get(reason)
        if task is None:
            task = self._waiting[reason] = asyncio.ensure_future(self._write(reason))
            task.add_done_callback(_retrieve)
        return await asyncio.shield(task)  # cancelling one caller must not cancel the dump for others

    async def _write(self, reason: str) -> WrittenDump:
        async with self._writing:
            del self._waiting[reason]
            return await asyncio.to_thread(self._dumps.write, reason)


def _retrieve(task: asyncio.Task[WrittenDump]) -> None:
    """Retrieve the task's error, which asyncio would log otherwise; callers get the error, too."""
    if not task.cancelled():
        task.exception()
