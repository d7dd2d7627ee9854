"""Measures the CPU time per token of server.py's server and of its streaming clients."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from bench.running_server import running_server
from shortfin_apps.llm.tools.bench.load import make_requests, run_pass
from shortfin_apps.llm.tools.bench.stats import summarise
from shortfin_apps.llm.tools.bench.target import TargetOptions, open_target
from shortfin_apps.llm.tools.bench.workload import Workload

PROMPT_TOKENS, OUTPUT_TOKENS = 32, 256


@dataclass(frozen=True, slots=True)
class HttpFigures:
    """The figures of one pass; CPU times in microseconds per output token."""

    tokens_per_s: float
    server_us: float
    client_us: float
    tokens_per_chunk: float
    errors: int


async def stream_tokens(rows: int, step_ms: float, profile: Path | None = None) -> HttpFigures:
    """Send one request from each of `rows` clients at once, after an unmeasured pass."""
    flags = ["--rows", str(rows), "--step-ms", str(step_ms)]
    if profile is not None:
        flags += ["--profile", str(profile)]
    workload = Workload(
        name="host",
        about="",
        prompt_tokens=(PROMPT_TOKENS,) * rows,
        output_tokens=OUTPUT_TOKENS,
        concurrency=rows,
    )
    with running_server(flags, module="bench.host.server") as server:
        async with open_target("idle", server.url, TargetOptions()) as target:
            first = await make_requests(target, workload, secrets.token_hex(4), "")
            await run_pass(target.http, target.model, first, rows)
            requests = await make_requests(target, workload, secrets.token_hex(4), "")
            client_s, server_s = time.process_time(), server.cpu_s()
            records = await run_pass(target.http, target.model, requests, rows)
            client_s, server_s = time.process_time() - client_s, server.cpu_s() - server_s
    num_chunks = sum(len(record.chunks_s) for record in records)
    summary = summarise(records, client_s)
    return HttpFigures(
        tokens_per_s=summary.output_tokens_per_s,
        server_us=server_s / summary.output_tokens * 1e6,
        client_us=client_s / summary.output_tokens * 1e6,
        tokens_per_chunk=summary.output_tokens / num_chunks,
        errors=summary.errors,
    )
