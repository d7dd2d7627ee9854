"""The programs of a cluster, run by child.py.

    python -m shortfin_apps.llm.tools.cluster.program worker LISTENER REPORTER FLAG...
    python -m shortfin_apps.llm.tools.cluster.program router PACKAGE

A worker runs `serve` on a port held by the cluster's process: LISTENER and REPORTER are the file descriptors
of HandedDown. A router (PACKAGE is smg or vllm_router) reads its flags as JSON from stdin. They contain keys,
and a command line is visible to all users of the machine.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence

from shortfin_apps.llm.tools.cluster.ports import HandedDown


def worker(argv: Sequence[str]) -> int:
    from shortfin_apps.llm.serving.server.command import main as serve  # a router does not need it

    listener_fd, reporter_fd, *flags = argv
    return serve(flags, HandedDown(int(listener_fd), int(reporter_fd)))


def router(package: str, flags: list[str]) -> None:
    """Run the router until a signal. smg and vllm_router are forks of one project with the same API."""
    launch = importlib.import_module(f"{package}.launch_router")
    module = importlib.import_module(f"{package}.router")
    module.Router.from_args(launch.parse_router_args(flags)).start()


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        sys.exit(worker(sys.argv[2:]))
    router(sys.argv[2], json.load(sys.stdin))
