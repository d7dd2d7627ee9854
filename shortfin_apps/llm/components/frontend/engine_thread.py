"""The engine's thread: between two steps it takes in what the event loop sent.

    event loop                                engine thread
    send ── inbox (deque) ──────────────────> drained before each step
    on_deltas <── one call_soon per step ──── deltas of the step

Batches, not tokens, cross the border. The thread sleeps on an event while there is no work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.engine.stats import EngineStats
from shortfin_apps.llm.components.request.messages import Delta, GenerateCall
from shortfin_apps.llm.errors import InvocationError, LlmError

logger = logging.getLogger(__name__)


class Abort(NamedTuple):
    request_id: str
    error: LlmError | None = None


class FlushCache:
    """Frees every page that is only kept for its prefix."""


Message = GenerateCall | Abort | FlushCache


class EngineThread:
    """Runs an Engine. The public methods and properties are the event loop's, the others the thread's.

    `on_deltas` is called in the event loop after each step, `on_death` there when a bug ended the thread;
    `on_close` in the thread itself, as its last act.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_deltas: Callable[[list[Delta]], None],
        on_death: Callable[[], None],
        on_close: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._on_deltas = on_deltas
        self._on_death = on_death
        self._on_close = on_close
        self._clock = clock
        self._inbox: deque[Message] = deque()
        self._wake = threading.Event()
        self._turn_began_s: float | None = None  # None while the thread sleeps
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.is_stopping = False
        self.stats: EngineStats = engine.stats()  # after the last step

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def send(self, message: Message) -> None:
        self._inbox.append(message)
        self._wake.set()

    def stop(self) -> None:
        """Ends the thread after the step under way."""
        self.is_stopping = True
        self._wake.set()

    def join(self, timeout_s: float | None = None) -> None:
        self._thread.join(timeout_s)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def turn_s(self) -> float:
        """The duration of the current turn so far; 0 while the thread sleeps."""
        began_s = self._turn_began_s
        return 0.0 if began_s is None else self._clock() - began_s

    def _run(self) -> None:
        try:
            while not self.is_stopping:
                if not self._engine.has_work and not self._inbox:
                    self._wake.wait()
                self._work()
        except BaseException:
            logger.critical("the engine's thread has ended", exc_info=True)
            self._turn_began_s = None
            self._call_soon(self._on_death)
        finally:
            self._on_close()

    def _work(self) -> None:
        """One turn, and its deltas on their way to the event loop."""
        self._wake.clear()
        self._turn_began_s = self._clock()
        deltas = self._turn()
        self._turn_began_s = None
        if deltas:
            self._call_soon(self._on_deltas, deltas)

    def _turn(self) -> list[Delta]:
        """Empties the inbox, and steps."""
        deltas: list[Delta] = []
        try:
            self._empty_inbox(deltas)
            deltas += self._engine.step()
        except Exception:
            logger.exception("the engine failed outside an invocation; its requests are ended")
            deltas += self._engine.fail_all(InvocationError("the engine failed; the request was ended"))
        self.stats = self._engine.stats()
        return deltas

    def _empty_inbox(self, deltas: list[Delta]) -> None:
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, GenerateCall):
                self._engine.add(message)
            elif isinstance(message, FlushCache):
                self._engine.flush_cache()
            elif (delta := self._engine.abort(message.request_id, message.error)) is not None:
                deltas.append(delta)

    def _call_soon(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None, "the thread was started without `start`"
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(function, *arguments)
