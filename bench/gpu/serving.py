"""The HTTP server over loopback, under the load generator of `shortfin-llm bench`.

One process cannot generate the load for a fast GPU: several share the clients, and start together.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from bench.gpu.loops import loop_sizes
from bench.gpu.mixed import LONGEST, OUTPUT_TOKENS, SHORTEST
from bench.gpu.models import Model
from bench.running_server import running_server
from shortfin_apps.llm.artifact.artifact import Manifest
from shortfin_apps.llm.artifact.file_names import MANIFEST
from shortfin_apps.llm.components.batching.mode import BatchModeName
from shortfin_apps.llm.tools.bench.load import make_requests, run_pass
from shortfin_apps.llm.tools.bench.stats import RequestRecord, Summary, summarise
from shortfin_apps.llm.tools.bench.target import TargetOptions, open_target
from shortfin_apps.llm.tools.bench.workload import Workload

# Batching mode, clients (fewer for a model of small batches), and the server's API processes.
LOADS: Sequence[tuple[BatchModeName, int, int]] = (
    ("default", 64, 1),
    ("extend-attention", 64, 0),
    ("extend-attention", 64, 1),
    ("extend-attention", 256, 1),
    ("extend-attention", 256, 4),
    ("extend-attention", 512, 4),
)
CLIENTS_OF_A_GENERATOR = 32
REQUESTS_OF_A_CLIENT = 4  # with fewer, the first prompts and the last requests are most of the time
START_TIMEOUT_S = 60.0

_start: Barrier  # of this generator's process


def workloads(clients: int) -> Iterator[Workload]:
    """Yield workloads for as many clients; the mixed one has as many prompt lengths."""
    yield Workload(
        name="even",
        about=f"{clients} clients, 128 in, 128 out",
        prompt_tokens=(128,) * (REQUESTS_OF_A_CLIENT * clients),
        output_tokens=128,
        concurrency=clients,
    )
    step = (LONGEST - SHORTEST) / max(1, clients - 1)
    lengths = [SHORTEST + round(index * step) for index in range(clients)]
    yield Workload(
        name="mixed",
        about=f"{clients} clients, {SHORTEST} to {LONGEST} in, {OUTPUT_TOKENS} out",
        prompt_tokens=tuple(REQUESTS_OF_A_CLIENT * lengths),
        output_tokens=OUTPUT_TOKENS,
        concurrency=clients,
    )


def parts(workload: Workload, count: int) -> list[Workload]:
    """Divide a workload among generators; its clients must be a multiple of `count`."""
    assert workload.concurrency % count == 0
    concurrency = workload.concurrency // count
    return [
        replace(workload, prompt_tokens=workload.prompt_tokens[index::count], concurrency=concurrency)
        for index in range(count)
    ]


def generate(url: str, workload: Workload) -> Summary:
    """Run a workload from several processes that start together, and return the figures of all requests."""
    count = max(1, workload.concurrency // CLIENTS_OF_A_GENERATOR)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        count, context, initializer=_keep, initargs=(context.Barrier(count),)
    ) as generators:
        done = list(generators.map(_generated, [url] * count, parts(workload, count)))
    return summarise([record for records, _ in done for record in records], max(cpu_s for _, cpu_s in done))


def _keep(start: Barrier) -> None:
    global _start
    _start = start


def _generated(url: str, workload: Workload) -> tuple[Sequence[RequestRecord], float]:
    """Run a generator's part; return its records and its CPU seconds."""
    return asyncio.run(_generate(url, workload))


async def _generate(url: str, workload: Workload) -> tuple[Sequence[RequestRecord], float]:
    async with open_target("ours", url, TargetOptions()) as target:
        first = replace(workload, prompt_tokens=workload.prompt_tokens[:1])
        unmeasured = await make_requests(target, first, secrets.token_hex(4), "")
        requests = await make_requests(target, workload, secrets.token_hex(4), "")
        await run_pass(target.http, target.model, unmeasured, 1)
        _start.wait(START_TIMEOUT_S)
        cpu_s = time.process_time()
        records = await run_pass(target.http, target.model, requests, workload.concurrency)
        return records, time.process_time() - cpu_s


def server_flags(
    directory: Path, model: Model, device: str, mode: str, depth: int, clients: int, processes: int
) -> list[str]:
    """Return the server's flags, with enough pages for the longest requests of all clients."""
    pages = 1 + clients * (-(-(LONGEST + OUTPUT_TOKENS) // model.options.block_seq_stride) + 1)
    return [
        *(str(directory), "--device", device, "--runtime", "iree", "--verify", "size"),
        *("--batch-mode", mode, "--pipeline-depth", str(depth), "--api-processes", str(processes)),
        *("--pages", str(pages), "--max-queue", str(2 * clients)),
    ]


def measure(model: Model, directory: Path, device: str, emit: Callable[[dict[str, Any]], None]) -> None:
    """Start a server for each of LOADS, and emit the figures of each workload."""
    manifest = Manifest.load(directory / MANIFEST)
    depth = 1 if loop_sizes(manifest.program.entries) else 0
    for mode, most_clients, processes in LOADS:
        clients = min(most_clients, 4 * max(model.options.decode_batch_sizes))
        flags = server_flags(directory, model, device, mode, depth, clients, processes)
        with running_server(flags) as server:
            for workload in workloads(clients):
                emit(
                    {
                        "part": "http",
                        "model": model.name,
                        "workload": workload.name,
                        "about": workload.about,
                        "mode": mode,
                        "depth": depth,
                        "api_processes": processes,
                        **asdict(generate(server.url, workload)),
                    }
                )
