"""The HTTP server over loopback, under the load generator of `shortfin-llm bench`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.gpu.loops import loop_sizes
from bench.gpu.mixed import CLIENTS, LONGEST, OUTPUT_TOKENS, SHORTEST
from bench.gpu.models import Model
from bench.running_server import running_server
from shortfin_apps.llm.artifact.artifact import Manifest
from shortfin_apps.llm.artifact.file_names import MANIFEST
from shortfin_apps.llm.components.batching import BATCH_MODES
from shortfin_apps.llm.tools.bench.load import run_workload
from shortfin_apps.llm.tools.bench.target import TargetOptions, open_target
from shortfin_apps.llm.tools.bench.workload import Workload

MIXED_TOKENS = SHORTEST, LONGEST  # shortest and longest prompt of the mixed workload
MIXED_OUTPUT_TOKENS = OUTPUT_TOKENS


def workloads(clients: int = CLIENTS) -> Iterator[Workload]:
    """Yield workloads with two requests per client; the mixed one has as many prompt lengths as clients."""
    yield Workload(
        name="even",
        about=f"{clients} clients, 128 in, 128 out",
        prompt_tokens=(128,) * (2 * clients),
        output_tokens=128,
        concurrency=clients,
    )
    shortest, longest = MIXED_TOKENS
    step = (longest - shortest) / max(1, clients - 1)
    lengths = [shortest + round(index * step) for index in range(clients)]
    yield Workload(
        name="mixed",
        about=f"{clients} clients, {shortest} to {longest} in, {MIXED_OUTPUT_TOKENS} out",
        prompt_tokens=tuple(2 * lengths),
        output_tokens=MIXED_OUTPUT_TOKENS,
        concurrency=clients,
    )


def server_flags(model: Model, directory: Path, device: str, mode: str, depth: int) -> list[str]:
    """Return the server's flags, with enough pages for the longest requests of all clients."""
    stride = model.options.block_seq_stride
    pages = 1 + CLIENTS * (-(-(MIXED_TOKENS[1] + MIXED_OUTPUT_TOKENS) // stride) + 1)
    return [
        *(str(directory), "--device", device, "--runtime", "iree", "--verify", "size"),
        *("--batch-mode", mode, "--pipeline-depth", str(depth)),
        *("--pages", str(pages), "--max-queue", str(2 * CLIENTS)),
    ]


async def measure(model: Model, directory: Path, device: str, emit: Callable[[dict[str, Any]], None]) -> None:
    """Start a server in each batching mode, and emit the figures of each workload."""
    manifest = Manifest.load(directory / MANIFEST)
    depth = 1 if loop_sizes(manifest.entries) else 0
    for mode in BATCH_MODES:
        with running_server(server_flags(model, directory, device, mode, depth)) as server:
            async with open_target("ours", server.url, TargetOptions()) as target:
                for workload in workloads():
                    async for name, summary in run_workload(target, workload, secrets.token_hex(4)):
                        emit(
                            {
                                "part": "http",
                                "model": model.name,
                                "workload": name,
                                "about": workload.about,
                                "mode": mode,
                                "depth": depth,
                                **asdict(summary),
                            }
                        )
