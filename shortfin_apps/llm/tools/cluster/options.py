"""Options of `cluster` in addition to the flags of `serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

RouterName = Literal["smg", "vllm-router"]
ROUTER_NAMES: tuple[RouterName, ...] = get_args(RouterName)

# The routers' default metrics port.
METRICS_PORT = 29000


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Numbers of processes and ports; `router_flags` are passed to the router unchanged, after ours."""

    workers: int = 2
    router: RouterName = "smg"
    policy: str = "cache_aware"
    metrics_port: int = METRICS_PORT
    start_timeout_s: float = 600.0
    router_flags: tuple[str, ...] = ()
