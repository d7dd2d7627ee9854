"""Derives each worker's settings from the cluster's.

A cluster has the settings of `serve`. Those about the address for clients go to the router
(`router_flags.py`). Each worker gets all other settings; devices and CPUs are divided between the workers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from shortfin_apps.llm.contract.host_cpu import MAX_CPU_WORKERS
from shortfin_apps.llm.serving.server.config import (
    BUILD_SETTINGS,
    KEYS,
    ServerConfig,
    ServerConfigError,
    flag,
)
from shortfin_apps.llm.tools.cluster.ports import LOOPBACK

# Settings of the router, and settings used to build the model before workers start.
NOT_OF_WORKERS = (*("host", "port", "cors_origin", "ssl_certfile", "ssl_keyfile"), *(*KEYS, *BUILD_SETTINGS))
WITHOUT_MEANING = {
    "root_path": "no router strips a prefix; do that in the proxy",
    "drain_delay": "the router is notified first",
    **dict.fromkeys(
        ("kv_events_endpoint", "kv_events_replay_endpoint"),
        "each worker would need an endpoint of its own; start the servers yourself (docs/routers.md)",
    ),
    **dict.fromkeys(
        ("gateway_key", "tenant_header"),
        "the router does not pass the tenant's header on; start the servers yourself (docs/routers.md)",
    ),
}


def check(config: ServerConfig) -> None:
    """Raise ServerConfigError for a setting that clusters do not support."""
    for name, reason in WITHOUT_MEANING.items():
        if name in config.given:
            raise ServerConfigError(f"`{flag(name)}` is not for clusters: {reason}")


def worker_settings(
    config: ServerConfig, ports: Sequence[int], keys: Sequence[str], admin_keys: Sequence[str]
) -> list[dict[str, Any]]:
    """Return one worker's settings, by name and as JSON types, for each of `ports`.

    Raises ServerConfigError if the devices cannot be divided evenly.
    """
    names = config.given.keys() - {*NOT_OF_WORKERS, "device_ids"}
    shared = {name: value for name, value in config.to_json().items() if name in names}
    shared |= {name: list(each) for name, each in (("api_key", keys), ("admin_api_key", admin_keys)) if each}
    if config.engine.is_on_gpu:
        shared["device"] = config.engine.driver  # each worker asks its GPUs for their chip
    if takes_threads(config):
        shared["threads"] = min(max(1, len(os.sched_getaffinity(0)) // len(ports)), MAX_CPU_WORKERS)
    devices = dealt_devices(config, len(ports))
    return [
        shared | {"host": LOOPBACK, "port": port} | ({"device_ids": list(ids)} if ids else {})
        for port, ids in zip(ports, devices, strict=True)
    ]


def takes_threads(config: ServerConfig) -> bool:
    """Whether to set each worker's number of threads. By default a worker starts a thread per CPU."""
    engine = config.engine
    return not engine.is_on_gpu and engine.threads is None and engine.runtime != "shortfin"


def dealt_devices(config: ServerConfig, num_workers: int) -> list[tuple[str, ...]]:
    """Return each worker's `--device-ids`: equal shares of the given ones, in order.

    If none are given: GPU i for worker i; no ids on CPUs. Raises ServerConfigError for unequal shares.
    """
    ids = config.engine.device_ids
    if not ids:
        return [(str(index),) if config.engine.is_on_gpu else () for index in range(num_workers)]
    if len(ids) % num_workers:
        raise ServerConfigError(
            f"`--device-ids` names {len(ids)} devices, which {num_workers} workers cannot share evenly; give"
            " each worker as many, or change `--workers`"
        )
    return list(_pieces(ids, len(ids) // num_workers))


def _pieces(ids: tuple[str, ...], size: int) -> Iterator[tuple[str, ...]]:
    return (ids[start : start + size] for start in range(0, len(ids), size))
