"""CPU time of a thread without Python's garbage collections.

A collection runs on whichever thread happens to allocate, and takes 0.2 s and more in a large process. The
code that it interrupts must not be charged for it.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Mapping


class _Collections(threading.local):
    """The collections that ran on one thread, in seconds of its CPU time."""

    began_s = 0.0
    total_s = 0.0


class WorkTime:
    """A clock: the CPU time of the calling thread, without the collections that `note` was called for."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._collections = _Collections()

    def __call__(self) -> float:
        return self._clock() - self._collections.total_s

    def note(self, phase: str, _: Mapping[str, int]) -> None:
        """Notes the start or the end of a collection on this thread; a callback of `gc`."""
        if phase == "start":
            self._collections.began_s = self._clock()
        else:
            self._collections.total_s += self._clock() - self._collections.began_s


work_time = WorkTime()
gc.callbacks.append(work_time.note)
