"""An AsyncEngine without a thread: a test decides when the engine, the event loop and the clock go on.

All of it runs in one thread, in an order that a seed can decide: the test runs the loop between two turns of
the engine, or in the middle of one, from a call of the device.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.request.messages import Delta
from shortfin_apps.llm.serving.frontend.async_engine import AsyncEngine


class SteppedClock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class SteppedLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers follow `clock`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._stepped_clock = clock

    def time(self) -> float:
        return self._stepped_clock()

    def run(self, times: int = 1) -> None:
        """Runs what is ready, `times` times."""
        for _ in range(times):
            self.call_soon(self.stop)
            self.run_forever()


class NeverBackError(BaseException):
    """Raised from a call of the device that never returns: the engine's thread is stuck in it."""


class _Unstarted(threading.Thread):
    """In the place of the engine's thread; `SteppedEngine.turn` does its work."""

    def start(self) -> None:
        return None

    def is_alive(self) -> bool:
        return True


class SteppedEngine(AsyncEngine):
    """`last` has the last delta of each request; a second one fails the test."""

    def __init__(self, engine: Engine, **options: Any) -> None:
        super().__init__(engine, **options)
        self._take_turn = self._thread._turn
        self._thread._thread = _Unstarted()
        self._thread._turn = self._turn  # type: ignore[method-assign]
        self.is_stuck = False
        self.last: dict[str, Delta] = {}

    @property
    def reserved(self) -> tuple[int, int]:
        """Requests and prompt tokens that admission counts."""
        return self._admission.num_requests, self._admission.num_tokens

    @property
    def has_work(self) -> bool:
        return not self.is_stuck and (self._engine.has_work or bool(self._thread._inbox))

    def turn(self) -> None:
        """Does what the thread does between two sleeps."""
        if not self.has_work:
            return
        try:
            self._thread._work()
        except NeverBackError:
            self.is_stuck = True

    def _turn(self) -> list[Delta]:
        deltas = self._take_turn()
        for delta in deltas:
            assert delta.request_id not in self.last, f"{delta.request_id} was answered twice"
            if delta.finish_reason is not None:
                self.last[delta.request_id] = delta
        return deltas
