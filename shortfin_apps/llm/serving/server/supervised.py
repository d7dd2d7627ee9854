"""A server process that `--restart-on-device-loss` starts, and starts again (`restarts.py`).

    python -m shortfin_apps.llm.serving.server.supervised LISTENER SIGNS < OPTIONS

LISTENER and SIGNS are file descriptors: the port's socket, which outlives this process, and a pipe for signs
of life. OPTIONS are JSON; they contain keys, which must not appear in a list of processes.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from dataclasses import replace

from shortfin_apps.llm.contract.errors import LlmError
from shortfin_apps.llm.serving.server import logs
from shortfin_apps.llm.serving.server.command import served
from shortfin_apps.llm.serving.server.config import ServerConfig
from shortfin_apps.llm.serving.server.life_signs import LifeSigns

logger = logging.getLogger("shortfin_apps.llm.serving.server.supervised")  # this module runs as `__main__`

EXIT_REFUSED = 2


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
