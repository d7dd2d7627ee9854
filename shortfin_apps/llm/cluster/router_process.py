"""`python -m shortfin_apps.llm.cluster.router_process PACKAGE`: the router, its flags as JSON on stdin.

The flags hold keys, which the process list would show to every user of the machine.
"""

from __future__ import annotations

import importlib
import json
import sys


def main(package: str, flags: list[str]) -> None:
    """Runs the router until a signal; `package` is smg or vllm_router, which share their ancestor's API."""
    launch = importlib.import_module(f"{package}.launch_router")
    router = importlib.import_module(f"{package}.router")
    router.Router.from_args(launch.parse_router_args(flags)).start()


if __name__ == "__main__":
    main(sys.argv[1], json.load(sys.stdin))
