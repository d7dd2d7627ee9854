"""Stall detection: the event loop detects a device that does not answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from shortfin_apps.llm.contract.errors import UnavailableError
from shortfin_apps.llm.serving.frontend.engine_thread import EngineThread

CHECKS_PER_STALL = 10
GIVE_UP_STALLS = 2  # a turn of this many timeouts will not end: the device hangs


class StallWatch:
    """Calls `on_stall` in the event loop when a turn of the engine's thread takes longer than `timeout_s`.

    `on_hang` is called with the reason when the turn takes GIVE_UP_STALLS times as long, at each check. A
    turn: one step of the engine, or of the idle test. Checks run from `start` until `stop`; `on_stall` is
    called at most once per turn. Time in which the event loop did not run, measured by `loop_clock`, does not
    count: the process was suspended (SIGSTOP, a sleeping machine), which is no fault of the device.
    """

    def __init__(
        self,
        thread: EngineThread,
        timeout_s: float,
        *,
        on_stall: Callable[[UnavailableError], None],
        on_hang: Callable[[str], None] = lambda reason: None,
        loop_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._thread = thread
        self._timeout_s = timeout_s
        self._interval_s = timeout_s / CHECKS_PER_STALL
        self._on_stall = on_stall
        self._on_hang = on_hang
        self._loop_clock = loop_clock
        self._timer: asyncio.TimerHandle | None = None
        self._looked_s = loop_clock()
        self._turn_began_s: float | None = None  # of the turn last seen by a check
        self._missed_s = 0.0  # time in this turn in which the event loop did not run
        self._was_told = False  # `on_stall` was called for this turn

    @property
    def stalled(self) -> bool:
        return self._counted_s() > self._timeout_s

    def check_available(self) -> None:
        """Raise UnavailableError while the device does not answer."""
        if self.stalled:
            raise self.error()

    def error(self) -> UnavailableError:
        return UnavailableError(f"the device has not answered for more than {self._timeout_s:g} s")

    def start(self) -> None:
        self._looked_s = self._loop_clock()
        self._check_later()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._check_stall)

    def _check_stall(self) -> None:
        self._check_later()
        if self.stalled and not self._was_told:
            self._was_told = True
            self._on_stall(self.error())
        if (counted_s := self._counted_s()) > GIVE_UP_STALLS * self._timeout_s:
            self._on_hang(f"the device has not answered for {counted_s:.0f} s")

    def _counted_s(self) -> float:
        """Return the duration of the current turn, without the time in which the event loop did not run."""
        self._look()
        return self._thread.turn_s - self._missed_s

    def _look(self) -> None:
        """Add the time since the last check, beyond the check interval, to the missed time of this turn."""
        began_s, now_s = self._thread.turn_began_s, self._loop_clock()
        if began_s != self._turn_began_s:
            self._turn_began_s, self._missed_s, self._was_told = began_s, 0.0, False
        late_s = now_s - self._looked_s - self._interval_s
        self._looked_s = now_s
        if late_s > 0:
            self._missed_s = min(self._missed_s + late_s, self._thread.turn_s)
