"""The engine's thread: processes messages from the event loop between two steps.

    event loop                                engine thread
    send ── inbox (deque) ──────────────────> drained before each step
    on_deltas <── one call_soon per step ──── deltas of the step

Deltas cross threads in batches, one per step. The thread sleeps on an event while there is no work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.engine.engine_watch import EngineWatch
from shortfin_apps.llm.components.engine.snapshot import Snapshot
from shortfin_apps.llm.components.engine.stats import EngineStats
from shortfin_apps.llm.components.request.messages import Delta, GenerateCall
from shortfin_apps.llm.contract.errors import InvocationError, LlmError

logger = logging.getLogger(__name__)


class Abort(NamedTuple):
    request_id: str
    error: LlmError | None = None


class FlushCache:
    """Asks to free every cached page that no request uses."""


class Look(NamedTuple):
    """Asks for a snapshot with the steps numbered above `after`; `answer` is called in the event loop.

    `answer` gets None if a bug prevented the snapshot.
    """

    after: int
    answer: Callable[[Snapshot | None], None]


Message = GenerateCall | Abort | FlushCache | Look


class IdleTest(Protocol):
    """A device test that runs one step at a time while there are no requests."""

    @property
    def num_runs(self) -> int: ...

    @property
    def failure(self) -> str | None:
        """The fault found by the last run, or None."""
        ...

    @property
    def lost_device(self) -> str | None:
        """Why the device is lost, if a run has found that it is."""
        ...

    def notice_work(self) -> None:
        """Release a running test's resources: requests have arrived, or the thread ends. Never raises."""
        ...

    def seconds_until_due(self) -> float | None:
        """Return the time to wait for requests before the next step, or None to wait indefinitely."""
        ...

    def step(self) -> None:
        """Run at most one invocation. Never raises: a failing device is reported as `failure`."""
        ...


class EngineThread:
    """Runs an Engine in a thread. Public members are for the event loop, private ones for the thread.

    `on_deltas` is called in the event loop after each step, `on_lost` there with the reason after each step
    with a lost device, `on_death` there after a bug ended the thread, and `on_close` in the thread itself,
    last. `idle_test` runs while the thread has no work.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_deltas: Callable[[list[Delta]], None],
        on_lost: Callable[[str], None] = lambda reason: None,
        on_death: Callable[[], None],
        on_close: Callable[[], None],
        clock: Callable[[], float],
        idle_test: IdleTest | None = None,
    ) -> None:
        self._engine = engine
        self._idle_test = idle_test
        self._on_deltas = on_deltas
        self._on_lost = on_lost
        self._on_death = on_death
        self._on_close = on_close
        self._clock = clock
        self._watch = EngineWatch(engine, clock)
        self._inbox: deque[Message] = deque()
        self._wake = threading.Event()
        self.turn_began_s: float | None = None  # None while the thread sleeps
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.is_stopping = False
        self.stats: EngineStats = engine.stats()  # as of the last step

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def send(self, message: Message) -> None:
        self._inbox.append(message)
        self._wake.set()

    def stop(self) -> None:
        """End the thread after the current step."""
        self.is_stopping = True
        self._wake.set()

    def join(self, timeout_s: float | None = None) -> None:
        self._thread.join(timeout_s)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def turn_s(self) -> float:
        """Duration of the current turn so far; 0 while the thread sleeps."""
        began_s = self.turn_began_s
        return 0.0 if began_s is None else self._clock() - began_s

    def _run(self) -> None:
        try:
            while not self.is_stopping:
                if not self._engine.has_work and not self._inbox and not self._is_woken():
                    continue
                self._work()
        except BaseException:
            logger.critical("the engine's thread has ended", exc_info=True)
            self.turn_began_s = None
            self._call_soon(self._on_death)
        finally:
            if self._idle_test is not None:
                self._idle_test.notice_work()
            self._on_close()

    def _is_woken(self) -> bool:
        """Wait for work and return True; return False if a step of the idle test was due first and ran."""
        if self._idle_test is None:
            return self._wake.wait()
        if self._wake.wait(self._idle_test.seconds_until_due()):
            return True
        self.turn_began_s = self._clock()
        num_runs = self._idle_test.num_runs
        self._idle_test.step()
        if self._idle_test.num_runs > num_runs:
            self._engine.count_self_test(self._idle_test.failure)
            self.stats = self._engine.stats()
        self.turn_began_s = None
        if self._idle_test.lost_device is not None:
            self._call_soon(self._on_lost, self._idle_test.lost_device)
        return False

    def _work(self) -> None:
        """Run one turn and send the turn's deltas to the event loop."""
        self._wake.clear()
        if self._idle_test is not None:
            self._idle_test.notice_work()
        self.turn_began_s = self._clock()
        deltas = self._turn()
        self.turn_began_s = None
        if deltas:
            self._call_soon(self._on_deltas, deltas)
        if self.stats.lost_device is not None:
            self._call_soon(self._on_lost, self.stats.lost_device)

    def _turn(self) -> list[Delta]:
        """Empty the inbox, run a step of the engine, and return the deltas."""
        deltas: list[Delta] = []
        try:
            self._empty_inbox(deltas)
            deltas += self._engine.step()
        except Exception:
            logger.exception("the engine failed outside an invocation; its requests are ended")
            deltas += self._engine.fail_all(InvocationError("the engine failed; the request was ended"))
        stats = self._engine.stats()
        if self._watch.is_on:
            self._watch.note(self.stats, stats)
        self.stats = stats
        return deltas

    def _empty_inbox(self, deltas: list[Delta]) -> None:
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, GenerateCall):
                self._engine.add(message)
            elif isinstance(message, FlushCache):
                self._engine.flush_cache()
            elif isinstance(message, Look):
                self._look(message)
            elif (delta := self._engine.abort(message.request_id, message.error)) is not None:
                deltas.append(delta)

    def _look(self, look: Look) -> None:
        """Answer a snapshot request. A bug here must not end requests."""
        snapshot = None
        try:
            snapshot = self._watch.look(look.after)
        except Exception:
            logger.exception("no snapshot of the engine could be taken; please report this bug")
        self._call_soon(look.answer, snapshot)

    def _call_soon(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None, "the thread was started without `start`"
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is no receiver any more
            self._loop.call_soon_threadsafe(function, *arguments)
