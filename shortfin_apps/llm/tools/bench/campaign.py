"""Runs workloads against several servers in turns, so that machine noise affects all of them alike."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from shortfin_apps.llm.tools.bench.load import BenchRequest, measure, run_pass
from shortfin_apps.llm.tools.bench.stats import RequestRecord, Summary, summarise
from shortfin_apps.llm.tools.bench.target import Target
from shortfin_apps.llm.tools.bench.workload import Workload

WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class PassResult:
    """One pass of one workload against one server."""

    target: str
    workload: str
    repeat: int
    summary: Summary


async def run_campaign(
    targets: Sequence[Target],
    workloads: Sequence[Workload],
    repeats: int,
    seed: str,
    on_pass: Callable[[str], None],
    on_end: Callable[[RequestRecord], None],
) -> AsyncIterator[PassResult]:
    """Run every workload against every server, `repeats` times. All texts derive from `seed`.

    `on_pass` is called with a description of each pass before it starts, `on_end` with each request's record.
    The order of the servers alternates between repeats.
    """
    for repeat in range(repeats):
        for workload in workloads:
            order = targets if repeat % 2 == 0 else targets[::-1]
            for target in order:
                on_pass(f"{workload.name} on {target.label}")
                # Two addresses may lead to the same server, so targets share no text.
                own_seed = f"{seed}/{repeat}/{workload.name}/{target.label}"
                async for name, summary in run_workload(target, workload, own_seed, on_end):
                    yield PassResult(target.label, name, repeat, summary)


async def run_workload(
    target: Target,
    workload: Workload,
    seed: str,
    on_end: Callable[[RequestRecord], None] | None = None,
) -> AsyncIterator[tuple[str, Summary]]:
    """Run the passes of one workload against one server, after one unmeasured request of the same shape."""
    await _warm_up(target, workload, seed)
    for name in workload.passes:
        requests = await make_requests(target, workload, f"{seed}/{name}", f"{seed}/prefix")
        cpu_s = time.process_time()
        records = await run_pass(target.http, target.model, requests, workload.concurrency, on_end)
        yield name, summarise(records, time.process_time() - cpu_s)


async def make_requests(
    target: Target, workload: Workload, seed: str, prefix_seed: str
) -> list[BenchRequest]:
    """The requests of one pass, all different after the shared prefix."""
    return [
        BenchRequest(
            await target.prompts.prompt(
                f"{seed}/{index}", tokens, prefix_seed, workload.shared_prefix_tokens
            ),
            workload.output_tokens,
        )
        for index, tokens in enumerate(workload.prompt_tokens)
    ]


async def _warm_up(target: Target, workload: Workload, seed: str) -> None:
    # A failure here is ignored: the measured requests will fail the same way and are reported.
    tokens = workload.prompt_tokens[0] + workload.shared_prefix_tokens
    prompt = await target.prompts.prompt(f"{seed}/warm-up", tokens, "", 0)
    await measure(
        target.http, target.model, BenchRequest(prompt, min(workload.output_tokens, WARM_UP_TOKENS))
    )
