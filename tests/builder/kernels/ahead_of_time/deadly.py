"""Kernels that kill the process that imports them."""

from __future__ import annotations

import os
import signal
from typing import NoReturn


def __getattr__(name: str) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError(name)
