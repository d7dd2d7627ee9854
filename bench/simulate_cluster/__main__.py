"""Prefix hits and TTFT against the number of workers, for the policies of public routers.

    python -m bench.simulate_cluster                     # docs/scaling.md; 80 s of CPU time
    python -m bench.simulate_cluster --zipf 0 --workers 10,100 --policies "round robin,cache aware"

Simulated: conversations with shared prefixes, routers' rules (policies.py names their sources and versions),
and workers whose steps take the times that were measured on one GPU. Not simulated: HTTP and its cost,
workers that fail, several routers at once, what a router does when its own tree is full.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from bench.simulate_cluster.policies import POLICIES
from bench.simulate_cluster.simulation import Result, Simulation, WorkerOptions
from bench.simulate_cluster.workload import WorkloadOptions, draw

WORKERS = (1, 3, 10, 30, 100, 300, 1000)
FEW_WORKERS = 30  # fewer workers are simulated repeatedly, for about as many requests as with this many

HELP = {
    "rate": "requests a second for each worker, once conversations are under way",
    "duration_s": "simulated seconds in which requests arrive; those of the second half are counted",
    "groups": "how many shared prefixes (system prompts, tools) there are",
    "zipf": "exponent of their popularity: 1 gives the first of 1,000 a share of 13 percent, 0 all the same",
    "prefix_tokens": "tokens of a shared prefix",
    "question_tokens": "mean tokens of a user's turn",
    "answer_tokens": "mean tokens of an answer",
    "turns": "mean turns of a conversation",
    "think_s": "mean seconds from an answer to the next turn",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the table."""

    policy: str
    workers: int
    requests: int
    hit_rate: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    busiest: float


def simulate(
    policy: str, num_workers: int, workload: WorkloadOptions, workers: WorkerOptions, seed: int
) -> Cell:
    repeats = max(1, FEW_WORKERS // num_workers)
    results = [
        Simulation(draw(workload, num_workers, run), policy, num_workers, workers, run).run(
            workload.duration_s / 2, workload.duration_s
        )
        for run in range(seed, seed + repeats)
    ]
    return _cell(policy, num_workers, results)


def _cell(policy: str, num_workers: int, results: Sequence[Result]) -> Cell:
    ttft_ms = np.concatenate([result.ttft_s for result in results]) * 1e3
    asked = sum(result.prompt_tokens for result in results)
    return Cell(
        policy=policy,
        workers=num_workers,
        requests=len(ttft_ms),
        hit_rate=sum(result.hit_tokens for result in results) / asked,
        ttft_p50_ms=float(np.percentile(ttft_ms, 50)),
        ttft_p99_ms=float(np.percentile(ttft_ms, 99)),
        busiest=float(np.median([result.busiest for result in results])),
    )


def simulate_all(
    policies: Sequence[str],
    counts: Sequence[int],
    workload: WorkloadOptions,
    workers: WorkerOptions,
    seed: int,
    jobs: int,
) -> list[Cell]:
    """Simulate all cells, the largest first; return them by policy."""
    order = sorted(((count, policy) for count in counts for policy in policies), reverse=True)
    with ProcessPoolExecutor(jobs) as pool:
        waiting = [pool.submit(simulate, policy, count, workload, workers, seed) for count, policy in order]
        cells = [one.result() for one in waiting]
    return sorted(cells, key=lambda cell: (policies.index(cell.policy), cell.workers))


def table(cells: Sequence[Cell], policies: Sequence[str], counts: Sequence[int]) -> Iterator[str]:
    """Yield three Markdown tables, by policy and number of workers."""
    found = {(cell.policy, cell.workers): cell for cell in cells}
    titles: dict[str, Callable[[Cell], str]] = {
        "prefix hit rate": lambda cell: f"{cell.hit_rate:.3f}",
        "TTFT p99 (p50), ms": lambda cell: f"{cell.ttft_p99_ms:,.0f} ({cell.ttft_p50_ms:.0f})",
        "requests of the busiest worker / average": lambda cell: f"{cell.busiest:.1f}",
    }
    for title, text in titles.items():
        yield f"| {title} | " + " | ".join(f"{count:,}" for count in counts) + " |"
        yield "|---" * (1 + len(counts)) + "|"
        for policy in policies:
            yield f"| {policy} | " + " | ".join(text(found[policy, count]) for count in counts) + " |"
        yield ""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulate_cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workers", type=_counts, default=WORKERS, help="numbers of workers (1,3,10,...)")
    parser.add_argument(
        "--policies", type=_policies, default=tuple(POLICIES), help=f"of {', '.join(POLICIES)} (all)"
    )
    for field in fields(WorkloadOptions):
        flag, default = "--" + field.name.replace("_", "-"), field.default
        parser.add_argument(flag, type=type(default), default=default, help=f"{HELP[field.name]} ({default})")
    default_cache = WorkerOptions().cache_tokens
    parser.add_argument(
        "--cache-tokens",
        type=int,
        default=default_cache,
        help=f"tokens that fit into a worker's KV cache ({default_cache})",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first run (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (one for each CPU)")
    parser.add_argument("--json", type=Path, help="also write the cells there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parse(arguments)
    workload = WorkloadOptions(**{f.name: getattr(chosen, f.name) for f in fields(WorkloadOptions)})
    workers = WorkerOptions(cache_tokens=chosen.cache_tokens)
    cells = simulate_all(chosen.policies, chosen.workers, workload, workers, chosen.seed, max(1, chosen.jobs))
    print("\n".join(table(cells, chosen.policies, chosen.workers)), end="")
    if chosen.json:
        rows = [{f.name: getattr(cell, f.name) for f in fields(Cell)} for cell in cells]
        chosen.json.write_text(json.dumps(rows, indent=1) + "\n")


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) for part in text.split(","))
    if min(counts) < 1:
        raise argparse.ArgumentTypeError("there is at least one worker")
    return counts


def _policies(text: str) -> tuple[str, ...]:
    chosen = tuple(part.strip() for part in text.split(","))
    if unknown := set(chosen) - set(POLICIES):
        raise argparse.ArgumentTypeError(
            f"there is no {', '.join(sorted(unknown))}; there are {', '.join(POLICIES)}"
        )
    return chosen


if __name__ == "__main__":
    main()
