"""What `cluster` takes beside the flags of `serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

RouterName = Literal["smg", "vllm-router"]
ROUTER_NAMES: tuple[RouterName, ...] = get_args(RouterName)

# The routers' own default: port of their metrics.
METRICS_PORT = 29000


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Numbers of processes and their ports; `router_flags` go to the router as they are, after ours."""

    workers: int = 2
    router: RouterName = "smg"
    policy: str = "cache_aware"
    metrics_port: int = METRICS_PORT
    start_timeout_s: float = 600.0
    router_flags: tuple[str, ...] = ()
