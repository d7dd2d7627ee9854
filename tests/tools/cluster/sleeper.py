"""Prints its process id, then `SIGTERM` when it gets that, and ends."""

from __future__ import annotations

import os
import signal

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print(os.getpid(), flush=True)
print(signal.Signals(signal.sigwait({signal.SIGTERM})).name, flush=True)
