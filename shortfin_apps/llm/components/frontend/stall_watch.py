"""Stall detection: notices a device that does not answer, from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shortfin_apps.llm.components.frontend.engine_thread import EngineThread
from shortfin_apps.llm.errors import UnavailableError

CHECKS_PER_STALL = 10


class StallWatch:
    """Calls `on_stall` in the event loop when a turn of the engine's thread takes longer than `timeout_s`.

    Checks from `start` until `is_needed` is False, which is asked at each check.
    """

    def __init__(
        self,
        thread: EngineThread,
        timeout_s: float,
        *,
        is_needed: Callable[[], bool],
        on_stall: Callable[[UnavailableError], None],
    ) -> None:
        self._thread = thread
        self._timeout_s = timeout_s
        self._is_needed = is_needed
        self._on_stall = on_stall
        self._timer: asyncio.TimerHandle | None = None

    @property
    def stalled(self) -> bool:
        return self._thread.turn_s > self._timeout_s

    def check_available(self) -> None:
        """Raises UnavailableError while the device does not answer."""
        if self.stalled:
            raise self._error()

    def start(self) -> None:
        if self._timer is None:
            delay_s = self._timeout_s / CHECKS_PER_STALL
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._check_stall)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check_stall(self) -> None:
        self._timer = None
        if self.stalled:
            self._on_stall(self._error())
        elif self._is_needed():
            self.start()

    def _error(self) -> UnavailableError:
        return UnavailableError(f"the device has not answered for more than {self._timeout_s:g} s")
