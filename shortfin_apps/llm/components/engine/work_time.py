"""A clock: CPU time of a thread without Python's garbage collections.

A collection runs on whichever thread happens to allocate, and can take over 0.2 s in a large process. The
interrupted code must not be charged for this time.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Mapping


class _Collections(threading.local):
    """CPU time of the collections on one thread, in seconds."""

    began_s = 0.0
    total_s = 0.0


class WorkTime:
    """CPU time of the calling thread in seconds, without the collections that `note` has recorded."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._collections = _Collections()

    def __call__(self) -> float:
        return self._clock() - self._collections.total_s

    def note(self, phase: str, _: Mapping[str, int]) -> None:
        """Record the start or the end of a collection on this thread; a callback of `gc`."""
        if phase == "start":
            self._collections.began_s = self._clock()
        else:
            self._collections.total_s += self._clock() - self._collections.began_s


work_time = WorkTime()
gc.callbacks.append(work_time.note)
