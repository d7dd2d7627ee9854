"""Measures throughput and time to first token under more load than the server's capacity.

    pip install --group bench                       # matplotlib
    python bench/overload.py DIR                    # writes overload.json and overload.svg
    python bench/overload.py --from FILE.json       # only draws

DIR is an artefact of `shortfin-llm build`. Measures the server's capacity in a closed loop: requests/s and
output tokens/s with enough clients to keep its queue full. Then offers a multiple of that as Poisson
arrivals without retries. Capacity is measured anew for each multiple, as the machine's speed drifts. Only
requests after `--ramp` seconds count, when the queue has filled. An admitted request waits only for those
admitted before it, so its time to first token is bounded by the time to serve all places (running and
queued) at capacity.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from mode_servers import counted_since, counters
from running_server import running_server

from shortfin_apps.llm.tools.bench.load import BenchRequest, measure
from shortfin_apps.llm.tools.bench.prose import text
from shortfin_apps.llm.tools.bench.stats import RequestRecord, percentile

PATIENCE_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of requests (mean for answers), capacity of the server, and duration of each load."""

    prompt_tokens: int
    output_tokens: int
    max_running: int
    max_queue: int
    ramp_s: float
    seconds: float

    @property
    def places(self) -> int:
        return self.max_running + self.max_queue


@dataclass(frozen=True, kw_only=True)
class Level:
    """The results of one load. Times are of admitted requests sent after the ramp."""

    name: str
    offered_per_s: float
    answered_per_s: float
    output_tokens_per_s: float
    ttft_s_p50: float
    ttft_s_p99: float
    refused: int
    failed: int


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A load, the capacity measured right before it, and the bound on TTFT."""

    capacity: Level
    load: Level
    bound_s: float


class Load:
    """Sends requests to one server and records the outcome of each."""

    def __init__(self, url: str, http: httpx.AsyncClient, plan: Plan, seed: int) -> None:
        self._url = url
        self._http = http
        self._plan = plan
        self._rng = random.Random(seed)
        answer = httpx.post(f"{url}/tokenize", json={"prompt": text(str(seed), 400)}, trust_env=False)
        self._token_ids: list[int] = answer.raise_for_status().json()["tokens"]

    async def closed(self, clients: int) -> Level:
        """Run a closed loop: each client sends its next request as soon as the last is answered."""
        until_s = time.perf_counter() + self._plan.ramp_s + self._plan.seconds
        records: list[RequestRecord] = []

        async def client() -> None:
            while time.perf_counter() < until_s:
                records.append(await self._ask())

        asking = asyncio.gather(*(client() for _ in range(clients)))
        return await self._level("capacity", records, asking)

    async def poisson(self, name: str, rate_per_s: float) -> Level:
        """Run an open loop: Poisson arrivals at a rate per second, independent of outcomes."""
        records: list[RequestRecord] = []

        async def ask() -> None:
            records.append(await self._ask())

        async def arrivals() -> None:
            now_s = time.perf_counter()
            until_s = now_s + self._plan.ramp_s + self._plan.seconds
            async with asyncio.TaskGroup() as asked:
                while (now_s := now_s + self._rng.expovariate(rate_per_s)) < until_s:
                    await asyncio.sleep(now_s - time.perf_counter())
                    asked.create_task(ask())

        return await self._level(name, records, asyncio.ensure_future(arrivals()))

    async def _ask(self) -> RequestRecord:
        prompt = self._rng.choices(self._token_ids, k=self._plan.prompt_tokens)
        # With equal lengths, requests that start together would also end together.
        output_tokens = self._rng.randint(self._plan.output_tokens // 2, 3 * self._plan.output_tokens // 2)
        return await measure(self._http, None, BenchRequest(prompt, output_tokens))

    async def _level(self, name: str, records: list[RequestRecord], asking: asyncio.Future[Any]) -> Level:
        """Measure from the end of the ramp to the last request, then wait for the answers."""
        await asyncio.sleep(self._plan.ramp_s)
        began_s, before = time.perf_counter(), await asyncio.to_thread(counters, self._url)
        await asyncio.sleep(self._plan.seconds)
        ended_s, counted = time.perf_counter(), await asyncio.to_thread(counted_since, before, self._url)
        await asking
        after = [record for record in records if began_s <= record.sent_s < ended_s]
        ttft_s = [record.ttft_s for record in after if record.ttft_s is not None]
        answered = [r for r in records if r.error is None and began_s <= r.ended_s < ended_s]
        refused = [record for record in after if record.error is not None and "try again" in record.error]
        return Level(
            name=name,
            offered_per_s=len(after) / (ended_s - began_s),
            answered_per_s=len(answered) / (ended_s - began_s),
            output_tokens_per_s=counted["vllm:generation_tokens_total"] / (ended_s - began_s),
            ttft_s_p50=percentile(ttft_s, 50) or math.nan,
            ttft_s_p99=percentile(ttft_s, 99) or math.nan,
            refused=len(refused),
            failed=sum(record.error is not None for record in after) - len(refused),
        )


@asynccontextmanager
async def load_of(url: str, plan: Plan, seed: int) -> AsyncIterator[Load]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits, trust_env=False) as http:
        yield Load(url, http, plan, seed)


async def run(url: str, plan: Plan, loads: Sequence[float], seed: int) -> list[Trial]:
    trials = []
    async with load_of(url, plan, seed) as load:
        for multiple in loads:
            capacity = await load.closed(plan.max_running + plan.max_queue // 2)
            level = await load.poisson(f"{multiple:g}x", multiple * capacity.answered_per_s)
            trials.append(Trial(capacity=capacity, load=level, bound_s=plan.places / capacity.answered_per_s))
            print(line_of(trials[-1]), flush=True)
    return trials


def line_of(trial: Trial) -> str:
    capacity, load = trial.capacity, trial.load
    cells = [
        load.name,
        f"{capacity.answered_per_s:.1f}, {load.offered_per_s:.1f}",
        f"{capacity.output_tokens_per_s:.0f}, {load.output_tokens_per_s:.0f}",
        f"{load.output_tokens_per_s / capacity.output_tokens_per_s:.2f}",
        f"{load.ttft_s_p50:.1f} / {load.ttft_s_p99:.1f}",
        f"{trial.bound_s:.1f}",
        str(load.refused),
        str(capacity.failed + load.failed),
    ]
    return f"| {' | '.join(cells)} |"


def draw(trials: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw two panels over the offered load: throughput over capacity; TTFT of admitted requests."""
    import matplotlib.pyplot as plt  # in the dependency group `bench`, not needed for measuring

    loads, capacities = [trial["load"] for trial in trials], [trial["capacity"] for trial in trials]
    pairs = list(zip(loads, capacities, strict=True))
    offered = [load["offered_per_s"] / capacity["answered_per_s"] for load, capacity in pairs]
    shares = [load["output_tokens_per_s"] / capacity["output_tokens_per_s"] for load, capacity in pairs]
    figure, (throughput, latency) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    throughput.plot(offered, shares, marker="o", label="output tokens/s")
    throughput.axhline(0.9, color="grey", linestyle="--", label="10 % less than capacity")
    throughput.set(title="Throughput, as a share of capacity", ylim=(0, None))
    latency.plot(offered, [load["ttft_s_p50"] for load in loads], marker="o", label="median")
    latency.plot(offered, [load["ttft_s_p99"] for load in loads], marker="o", label="p99")
    bounds = [trial["bound_s"] for trial in trials]
    latency.plot(offered, bounds, color="grey", linestyle="--", label="all places, at capacity")
    latency.set(title="Time to first token of admitted requests, s", ylim=(0, None))
    for axes in (throughput, latency):
        axes.set_xlabel("offered load, as a multiple of capacity")
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    figure.savefig(file)


def measured(artifact: Path, plan: Plan, loads: Sequence[float], flags: Sequence[str]) -> dict[str, Any]:
    places = ["--max-running", str(plan.max_running), "--max-queue", str(plan.max_queue)]
    print("| load | requests/s: capacity, offered | output tok/s: capacity, then | ratio ", end="")
    print("| TTFT p50 / p99 s | bound s | refused | failed |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with running_server([str(artifact), *places, *flags]) as server:
        trials = asyncio.run(run(server.url, plan, loads, seed=time.time_ns()))
    return {"plan": asdict(plan), "trials": [asdict(trial) for trial in trials]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path, nargs="?", metavar="DIR")
    parser.add_argument("--from", dest="measured", type=Path, metavar="FILE", help="draw an earlier run")
    parser.add_argument("--output", type=Path, default=Path("overload"), help="path without its ending")
    parser.add_argument("--loads", default="1,2,4", help="multiples of capacity (default: %(default)s)")
    parser.add_argument("--batch-mode", default="default", help="(default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument(
        "--output-tokens",
        type=int,
        default=32,
        help="in the mean (default: %(default)s)",
    )
    parser.add_argument("--max-running", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--max-queue", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--ramp", type=float, default=8, help="seconds (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20, help="of each load (default: %(default)s)")
    parser.add_argument("--no-plot", action="store_true", help="write the JSON alone")
    arguments = parser.parse_args()
    if (arguments.artifact is None) == (arguments.measured is None):
        parser.error("name the model directory to measure, or the JSON to draw with --from")
    file = arguments.measured or arguments.output.with_suffix(".json")
    if arguments.artifact is not None:
        plan = Plan(
            prompt_tokens=arguments.prompt_tokens,
            output_tokens=arguments.output_tokens,
            max_running=arguments.max_running,
            max_queue=arguments.max_queue,
            ramp_s=arguments.ramp,
            seconds=arguments.seconds,
        )
        loads = [float(multiple) for multiple in arguments.loads.split(",")]
        document = measured(arguments.artifact, plan, loads, ["--batch-mode", arguments.batch_mode])
        file.write_text(json.dumps(document, indent=1), encoding="utf-8")
    if not arguments.no_plot:
        draw(json.loads(file.read_text(encoding="utf-8"))["trials"], arguments.output.with_suffix(".svg"))


if __name__ == "__main__":
    main()
