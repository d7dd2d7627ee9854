"""Flags of the routers, Shepherd Model Gateway (smg) and vllm-router, which share most of them."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from shortfin_apps.llm.serving.server.config import ServerConfig, ServerConfigError
from shortfin_apps.llm.tools.cluster.ports import LOOPBACK, is_loopback

RouterName = Literal["smg", "vllm-router"]
ROUTER_NAMES: tuple[RouterName, ...] = get_args(RouterName)
METRICS_PORT = 29000  # the routers' default
PACKAGES: dict[RouterName, str] = {"smg": "smg", "vllm-router": "vllm_router"}
INSTALLS: dict[RouterName, str] = {"smg": "'shortfin-llm[cluster]'", "vllm-router": "'vllm-router==0.1.*'"}
# The route for the metrics of all workers, on the clients' port.
METRICS_ROUTES: dict[RouterName, str] = {"smg": "/engine_metrics", "vllm-router": "/metrics"}
GRACE_S = 5  # the router outlasts a worker's drain by this time


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Options besides the flags of `serve`. `router_flags` are appended to the router's command line."""

    workers: int = 2
    router: RouterName = "smg"
    policy: str = "cache_aware"
    metrics_port: int = METRICS_PORT
    start_timeout_s: float = 600.0
    router_flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Keys of a cluster. `public` are for clients and `admin` for administrators; either may be empty.

    `worker` authenticates the router to workers; `control` authenticates to the router's control plane.
    """

    public: tuple[str, ...]
    admin: tuple[str, ...]
    worker: str
    control: str

    @property
    def of_workers(self) -> tuple[str, ...]:
        """The keys that workers accept. Empty without public keys, as clients may then send any key.

        Workers accept public keys too: the router forwards a client's key, by which workers tell tenants.
        """
        return (*self.public, self.worker) if self.public else ()


def check_installed(router: RouterName) -> None:
    """Raise ServerConfigError, with the command to install it, if the router or httpx is missing."""
    for what, package, install in (
        (f"the router {router}", PACKAGES[router], INSTALLS[router]),
        ("httpx", "httpx", INSTALLS["smg"]),
    ):
        if importlib.util.find_spec(package) is None:
            raise ServerConfigError(f"{what} is not installed: run `pip install {install}`")


def dangers(config: ServerConfig, router: RouterName, keys: Keys) -> Iterator[str]:
    """Yield warnings about what anyone who reaches the router may do; none for a router on loopback."""
    if is_loopback(config.http.host):
        return
    if not keys.public:
        yield f"anyone who can reach {config.http.host} may use this cluster: set an --api-key"
    if router == "vllm-router":
        yield (
            f"anyone who can reach {config.http.host} may add and remove workers, as vllm-router has no key"
            " for that: keep it on loopback, or use `--router smg`"
        )


def router_flags(
    config: ServerConfig, options: ClusterOptions, keys: Keys, port: int, worker_ports: Sequence[int]
) -> list[str]:
    """Return the router's flags. Raises ServerConfigError for settings that the router does not support."""
    own = {"smg": _smg, "vllm-router": _vllm_router}[options.router]
    return [*_common(config, options, keys, port, worker_ports), *own(config, keys), *options.router_flags]


def _common(
    config: ServerConfig, options: ClusterOptions, keys: Keys, port: int, worker_ports: Sequence[int]
) -> list[str]:
    flags = {
        "--host": config.http.host,
        "--port": port,
        "--policy": options.policy,
        "--prometheus-host": LOOPBACK,
        "--prometheus-port": options.metrics_port,
        # A draining or loading worker is not ready. By default, both routers check only once a minute.
        "--health-check-endpoint": "/ready",
        "--health-check-interval-secs": 1,
        "--health-failure-threshold": 2,
        "--health-success-threshold": 1,
        "--worker-startup-check-interval": 1,
        # A worker that is ready again gets requests after 5 s, instead of the default of a minute.
        "--cb-timeout-duration-secs": 5,
        "--cb-success-threshold": 1,
    }
    words = [word for name, value in flags.items() for word in (name, str(value))]
    words += ["--worker-urls", *(f"http://{LOOPBACK}:{port}" for port in worker_ports)]
    if "max_body_bytes" in config.given:
        words += ["--max-payload-size", str(config.requests.max_body_bytes)]
    if config.http.cors_origin:
        words += ["--cors-allowed-origins", *config.http.cors_origin]
    if keys.of_workers:
        words += ["--api-key", keys.worker]
    return words


def _smg(config: ServerConfig, keys: Keys) -> list[str]:
    words = ["--log-level", "warn" if config.http.log_level in ("info", "warning") else config.http.log_level]
    words += ["--disable-tokenizer-autoload", "--history-backend", "none"]
    words += ["--shutdown-grace-period-secs", str(math.ceil(config.http.shutdown_timeout) + GRACE_S)]
    words += ["--log-json"] * (config.http.log_format == "json")
    if config.http.ssl_certfile is not None:
        words += ["--tls-cert-path", str(config.http.ssl_certfile)]
        words += ["--tls-key-path", str(config.http.ssl_keyfile or config.http.ssl_certfile)]
    control = [("cluster", keys.control), *((f"admin-{n}", key) for n, key in enumerate(keys.admin))]
    words += ["--control-plane-api-keys", *(f"{name}:{name}:admin:{key}" for name, key in control)]
    tenants = (*keys.public, *keys.admin) if keys.public else ()
    return words + [w for n, key in enumerate(tenants) for w in ("--tenant-api-key", f"key-{n}:{key}")]


def _vllm_router(config: ServerConfig, keys: Keys) -> list[str]:
    if config.http.ssl_certfile is not None:
        raise ServerConfigError("vllm-router has no TLS: use `--router smg`, or a proxy in front of it")
    return ["--log-level", "warning" if config.http.log_level == "info" else config.http.log_level]
