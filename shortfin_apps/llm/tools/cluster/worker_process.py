"""A worker: runs `serve` on a port held by the cluster's process (held_port.py).

    python -m shortfin_apps.llm.tools.cluster.worker_process LISTENER TELLS FLAGS

LISTENER and TELLS are file descriptors, the arguments of HandedDown.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shortfin_apps.llm.serving.server.command import main as serve
from shortfin_apps.llm.tools.cluster.held_port import HandedDown


def main(argv: Sequence[str]) -> int:
    listener_fd, tells_fd, *flags = argv
    return serve(flags, HandedDown(int(listener_fd), int(tells_fd)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
