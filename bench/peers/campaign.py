"""Runs the workloads on all servers in turns, pausing all but the measured server."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from bench.peers.kinds import WeightKind
from bench.peers.requirements import Needs
from bench.peers.server import Launch, Server, free_port
from shortfin_apps.llm.tools.bench.load import PassResult, run_workload
from shortfin_apps.llm.tools.bench.report import document
from shortfin_apps.llm.tools.bench.stats import RequestRecord
from shortfin_apps.llm.tools.bench.target import Target, TargetOptions, open_target
from shortfin_apps.llm.tools.bench.workload import Workload

IDLE_S = 2.0  # default time over which an idle server's CPU use is measured


class Contender(Protocol):
    """A server that can be set up and started."""

    @property
    def label(self) -> str: ...

    def needs(self, weights: WeightKind) -> Needs:
        """Return unmet requirements of `set_up` and `launch` on this machine; takes seconds."""
        ...

    def set_up(self, weights: WeightKind) -> None:
        """Prepare everything for `launch`; quick if done before. Raises SetUpError."""
        ...

    def launch(self, port: int, clients: int) -> Launch:
        """Return how to start the server for workloads with this many concurrent clients."""
        ...


class Stage:
    """All started servers. Owns their processes; use it as a context manager."""

    def __init__(self, logs: Path, on_start: Callable[[str], None], idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._logs = logs
        self._on_start = on_start
        self._servers: dict[tuple[str, tuple[str, ...]], Server] = {}
        self.idle_cpu: dict[str, float] = {}  # share of one core, after the server's first workload

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers.values():
            server.end()

    @asynccontextmanager
    async def turn(self, contender: Contender, clients: int, options: TargetOptions) -> AsyncIterator[Target]:
        """Resume the contender's server, with all others paused, and connect to it."""
        server = self._server(contender, clients)
        server.resume()
        try:
            async with open_target(contender.label, server.url, options) as target:
                yield target
            if contender.label not in self.idle_cpu:
                self.idle_cpu[contender.label] = _idle_cpu(server, self._idle_s)
        finally:
            server.pause()

    def peak_memory_bytes(self, label: str) -> int:
        """Return the peak memory of the largest server with this label."""
        return max(s.peak_memory_bytes() for (owner, _), s in self._servers.items() if owner == label)

    def _server(self, contender: Contender, clients: int) -> Server:
        # Servers are identified without their port.
        key = (contender.label, contender.launch(0, clients).command)
        if key not in self._servers:
            self._on_start(contender.label)
            port = free_port()
            server = Server(
                contender.launch(port, clients), port, self._logs / f"{contender.label}-server.log"
            )
            self._servers[key] = server
            server.wait_until_ready()
        return self._servers[key]


def _idle_cpu(server: Server, seconds: float) -> float:
    begin = server.cpu_s()
    time.sleep(seconds)
    return (server.cpu_s() - begin) / seconds


async def run_peers(
    contenders: Sequence[Contender],
    workloads: Sequence[Workload],
    repeats: int,
    seed: str,
    stage: Stage,
    on_pass: Callable[[str], None],
    on_end: Callable[[RequestRecord], None],
) -> dict[str, Any]:
    """Run the campaign; return the bench's document with each server's memory and idle CPU use."""
    started = datetime.now(UTC)
    targets: dict[str, Target] = {}
    results: list[PassResult] = []
    for repeat in range(repeats):
        for workload in workloads:
            for contender in contenders if repeat % 2 == 0 else contenders[::-1]:
                on_pass(f"{workload.name} on {contender.label}")
                own_seed = f"{seed}/{repeat}/{workload.name}/{contender.label}"
                async with stage.turn(contender, workload.concurrency, TargetOptions()) as target:
                    targets[contender.label] = target
                    async for name, summary in run_workload(target, workload, own_seed, on_end):
                        results.append(PassResult(contender.label, name, repeat, summary))
    ordered = [targets[contender.label] for contender in contenders]
    return document(ordered, workloads, results, seed, started) | {"servers": _servers(stage, targets)}


def _servers(stage: Stage, labels: Mapping[str, object]) -> dict[str, dict[str, float]]:
    return {
        label: {"peak_memory_bytes": stage.peak_memory_bytes(label), "idle_cpu": stage.idle_cpu[label]}
        for label in labels
    }
