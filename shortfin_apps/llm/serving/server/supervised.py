"""A server process that `--restart-on-device-loss` starts, and starts again (`restarts.py`).

    python -m shortfin_apps.llm.serving.server.supervised LISTENER SIGNS < OPTIONS

LISTENER and SIGNS are file descriptors: the port's socket, which outlives this process, and a pipe for signs
of life. OPTIONS are JSON; they contain keys, which must not appear in a list of processes.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

from shortfin_apps.llm.contract.errors import LlmError
from shortfin_apps.llm.serving.server import logs
from shortfin_apps.llm.serving.server.command import served
from shortfin_apps.llm.serving.server.config import ServerConfig, plain

logger = logging.getLogger("shortfin_apps.llm.serving.server.supervised")  # this module runs as `__main__`

LOADING, SERVING, LOST = b"l", b"s", b"x"  # signs of life; LOST is the last one
SIGN_INTERVAL_S = 1.0
EXIT_REFUSED = 2


def options_of(config: ServerConfig) -> bytes:
    """Serialise the settings, including secrets."""
    return json.dumps([config.given, config.source], default=plain).encode()


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


def main() -> int:
    listener, descriptor = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    listener.set_inheritable(False)
    os.set_inheritable(descriptor, False)
    settings, source = json.load(sys.stdin)
    config = replace(ServerConfig.of(settings), source=source)
    logs.set_up(config.http.log_level, config.http.log_format)
    try:
        return served(config, listener, LifeSigns(descriptor))
    except LlmError as error:
        logger.error("%s", error)
        return EXIT_REFUSED
    finally:
        logs.flush()


if __name__ == "__main__":
    sys.exit(main())
