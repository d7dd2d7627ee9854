"""Signs of life that a supervised server writes to a pipe, for its supervisor (`restarts.py`)."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

LOADING, SERVING, LOST = b"l", b"s", b"x"  # signs of life; LOST is the last one
SIGN_INTERVAL_S = 1.0


class LifeSigns:
    """Writes a sign of life every second, from a thread that needs Python's lock for it.

    A driver's call that holds the lock thus stops the signs. If the supervisor has ended, this process stops
    as if it had got SIGTERM.
    """

    def __init__(self, descriptor: int, interval_s: float = SIGN_INTERVAL_S) -> None:
        self._descriptor = descriptor
        self._interval_s = interval_s

    def start(self, serves: Callable[[], bool]) -> None:
        threading.Thread(target=self._run, args=(serves,), name="signs of life", daemon=True).start()

    def tell_loss(self) -> None:
        """Report that the process ends because its device is lost. It may never end: see `restarts.py`."""
        self._write(LOST)

    def _run(self, serves: Callable[[], bool]) -> None:
        pause = threading.Event()
        while self._write(SERVING if serves() else LOADING):
            pause.wait(self._interval_s)
        logger.error("the process that supervises this server has ended")
        os.kill(os.getpid(), signal.SIGTERM)

    def _write(self, sign: bytes) -> bool:
        try:
            os.write(self._descriptor, sign)
        except BrokenPipeError:
            return False
        return True
