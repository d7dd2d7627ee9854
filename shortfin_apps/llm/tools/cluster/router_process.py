"""`python -m shortfin_apps.llm.tools.cluster.router_process PACKAGE`: a router, its flags as JSON on stdin.

The flags contain keys, which the process list would show to all users of the machine.
"""

from __future__ import annotations

import importlib
import json
import sys


def main(package: str, flags: list[str]) -> None:
    """Run the router until a signal; `package` is smg or vllm_router, forks with a common API."""
    launch = importlib.import_module(f"{package}.launch_router")
    router = importlib.import_module(f"{package}.router")
    router.Router.from_args(launch.parse_router_args(flags)).start()


if __name__ == "__main__":
    main(sys.argv[1], json.load(sys.stdin))
