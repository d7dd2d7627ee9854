"""Measures what clients of a cluster see when workers die, drain or are full, and what the router costs.

    pip install -e '.[cluster]'                     # smg; or vllm-router
    python bench/cluster.py DIR                     # all cases, as rows of a table
    python bench/cluster.py DIR --cases killed,cost --router vllm-router

DIR is an artefact of `shortfin-llm build`. Each case has three workers of its own, with `--threads` threads.

killed    `kill -9` of a worker under 30 requests: first whole answers, then streams. An answer is compared
          with the same prompt's before; a cut stream is visible if it has an error event or no [DONE].
drained   SIGTERM to a worker under 50 requests, half of them streams; it is started again.
removed   a worker is taken out by the router's API (smg only) under 50 requests, then ended.
full      20 requests at once where each worker holds two.
prefixes  8 prefixes, where the cache of a worker holds 4: share of prompt tokens found cached; the busiest
          worker's requests over the idlest's.
cost      the same streams through the router and at a worker itself, in turns: gaps between tokens, and CPU
          time of the router's process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from shortfin_apps.llm.tools.bench.load import BenchRequest, run_pass
from shortfin_apps.llm.tools.bench.workload import sentence

WORKERS = 3
PATIENCE_S = 120.0
ADMIN_KEY = "bench-admin"
READY = re.compile(r"worker (\d).* is ready.*\(process (\d+)(?:, (\S+)\))?")


@dataclass
class Cluster:
    """A running cluster: process ids and addresses of its workers by number."""

    process: subprocess.Popen[str]
    url: str = ""
    model: str = ""
    pids: dict[int, int] = field(default_factory=dict)
    urls: dict[int, str] = field(default_factory=dict)

    def read_until(self, what: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if ready := READY.search(line):
                self.pids[int(ready[1])] = int(ready[2])
                self.urls.setdefault(int(ready[1]), ready[3])
            if what in line:
                return line
        raise SystemExit(f"the cluster ended with {self.process.wait()}")

    def router_pid(self) -> int:
        """Return the process id of the only child that is not a worker."""
        task = Path(f"/proc/{self.process.pid}/task/{self.process.pid}")
        children = {int(pid) for pid in (task / "children").read_text().split()}
        (router,) = children - {*self.pids.values()}
        return router

    async def metric(self, client: httpx.AsyncClient, worker: int, name: str) -> float:
        """Return a metric's sum over its labels; 0 for a worker that does not answer."""
        try:
            lines = (await client.get(f"{self.urls[worker]}/metrics")).text.splitlines()
        except httpx.HTTPError:
            return 0.0
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))

    async def metrics(self, client: httpx.AsyncClient, name: str) -> list[float]:
        return [await self.metric(client, worker, name) for worker in sorted(self.urls)]


@dataclass
class Outcome:
    """The client's view of one request."""

    status: int = 0
    text: str = ""
    whole: bool = False  # complete: with a finish reason, and for streams with [DONE] and no error event
    visible: bool = False  # whether the client can see that it failed
    retry_after: str | None = None


Case = Callable[["Bench"], Awaitable[None]]


@dataclass(frozen=True)
class Bench:
    directory: str
    router: str
    threads: int
    tokens: int
    clients: int
    router_flags: tuple[str, ...] = ()

    @asynccontextmanager
    async def cluster(
        self, *flags: str, router_flags: Sequence[str] = ()
    ) -> AsyncIterator[tuple[Cluster, httpx.AsyncClient]]:
        command = [
            sys.executable,
            "-m",
            "shortfin_apps.llm",
            "cluster",
            self.directory,
            "--router",
            self.router,
        ]
        command += ["--workers", str(WORKERS), "--threads", str(self.threads), "--port", "0"]
        command += ["--metrics-port", "0", "--admin-api-key", ADMIN_KEY, "--log-level", "warning", *flags]
        command += ["--router-flags", *self.router_flags, *router_flags]
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
            running = Cluster(process)
            try:
                found = re.search(r"Serving (\S+) at (http\S+)", running.read_until("Serving "))
                assert found is not None
                running.model, running.url = found[1], found[2]
                limits = httpx.Limits(max_connections=256)
                async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as client:
                    await until_healthy(running, client)
                    yield running, client
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait()

    async def ask(self, running: Cluster, client: httpx.AsyncClient, prompt: str, stream: bool) -> Outcome:
        body = {"model": running.model, "prompt": prompt, "max_tokens": self.tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": stream}
        seen = Outcome()
        try:
            async with client.stream("POST", f"{running.url}/v1/completions", json=body) as response:
                seen.status, seen.retry_after = response.status_code, response.headers.get("retry-after")
                if stream and response.is_success:
                    await _read_stream(response, seen)
                else:
                    _read_whole(await response.aread(), seen)
        except httpx.HTTPError:
            seen.visible = True
        return seen

    def prompts(self, number: int) -> list[str]:
        return [f"{index} {words(40, index)}" for index in range(number)]


async def _read_stream(response: httpx.Response, seen: Outcome) -> None:
    finished = done = failed = False
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            done = True
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            failed |= "error" in event
            for choice in event.get("choices", ()):
                seen.text += choice["text"]
                finished |= choice["finish_reason"] is not None
    seen.whole, seen.visible = finished and done and not failed, failed or not done


def _read_whole(content: bytes, seen: Outcome) -> None:
    seen.visible = seen.status != 200
    if seen.status == 200:
        seen.text, seen.whole = json.loads(content)["choices"][0]["text"], True


async def until_healthy(running: Cluster, client: httpx.AsyncClient) -> None:
    """Wait until the router knows all workers; vllm-router does not report their number."""
    while True:
        state = await client.get(f"{running.url}/readiness")
        if state.status_code == 200 and state.json().get("healthy_workers", WORKERS) == WORKERS:
            return
        await asyncio.sleep(0.1)


def row(case: str, what: str, figure: object) -> None:
    print(f"| {case} | {what} | {figure} |", flush=True)


async def killed(bench: Bench) -> None:
    async with bench.cluster() as (running, client):
        prompts = bench.prompts(30)
        before = [await bench.ask(running, client, prompt, stream=False) for prompt in prompts]
        for stream in (False, True):
            await until_healthy(running, client)
            asking = [asyncio.create_task(bench.ask(running, client, p, stream)) for p in prompts]
            victim = await busiest(running, client)
            os.kill(running.pids[victim], signal.SIGKILL)
            killed_s = time.monotonic()
            after = await asyncio.gather(*asking)
            await asyncio.to_thread(running.read_until, f"worker {victim} is ready again")
            ready_s = time.monotonic()
            used_s = await until_used(bench, running, client, victim)
            report(f"kill -9, {'streams' if stream else 'whole'}", [b.text for b in before], after)
            row(
                "kill -9",
                "s until ready again, and then until used",
                f"{ready_s - killed_s:.1f}, {used_s:.1f}",
            )


async def busiest(running: Cluster, client: httpx.AsyncClient) -> int:
    """Return the worker with the most running requests, once several run."""
    loads = [0.0]
    while sum(loads) < 2 * WORKERS:
        loads = await running.metrics(client, "vllm:num_requests_running")
    return 1 + loads.index(max(loads))


async def until_used(bench: Bench, running: Cluster, client: httpx.AsyncClient, worker: int) -> float:
    """Return the seconds until a newly ready worker finishes a request. Uses new prompts each time."""
    started_s = time.monotonic()
    seed = 1000
    while not await running.metric(client, worker, "vllm:request_success_total"):
        prompts = [f"{seed + index} {words(40, seed + index)}" for index in range(9)]
        await asyncio.gather(*(bench.ask(running, client, prompt, stream=False) for prompt in prompts))
        seed += 9
        if time.monotonic() - started_s > PATIENCE_S:
            return float("inf")
    return time.monotonic() - started_s


def report(case: str, expected: Sequence[str], seen: Sequence[Outcome]) -> None:
    """Print rows about answers: complete ones compared with the expected text, and kinds of failures."""
    kinds: Counter[str] = Counter()
    for want, outcome in zip(expected, seen, strict=True):
        if outcome.whole:
            kinds["whole" if outcome.text == want else "whole, but other tokens"] += 1
        elif not want.startswith(outcome.text):
            kinds["cut, with tokens that do not belong there"] += 1
        else:
            place = "before the first token" if not outcome.text else "within"
            kinds[f"{'cut' if outcome.visible else 'CUT WITHOUT A SIGN'} {place} ({outcome.status})"] += 1
    row(case, f"{len(seen)} answers", ", ".join(f"{number} {kind}" for kind, number in kinds.most_common()))


async def drained(bench: Bench) -> None:
    async with bench.cluster() as (running, client):
        await _under_load(bench, running, client, "SIGTERM", lambda: _terminate(running, 1))


async def removed(bench: Bench) -> None:
    if bench.router != "smg":
        row("removed", "not measured", "the API is smg's")
        return
    async with bench.cluster() as (running, client):

        async def take_out() -> None:
            headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
            workers = (await client.get(f"{running.url}/workers", headers=headers)).json()["workers"]
            (name,) = (each["id"] for each in workers if each["url"] == running.urls[1])
            (await client.delete(f"{running.url}/workers/{name}", headers=headers)).raise_for_status()
            await _terminate(running, 1)

        await _under_load(bench, running, client, "taken out, then SIGTERM", take_out)


async def _terminate(running: Cluster, worker: int) -> None:
    os.kill(running.pids[worker], signal.SIGTERM)


async def _under_load(
    bench: Bench, running: Cluster, client: httpx.AsyncClient, case: str, act: Callable[[], Awaitable[None]]
) -> None:
    """Send 50 requests; half are in progress when `act` is called, the others follow."""
    prompts = bench.prompts(50)
    before = [await bench.ask(running, client, prompt, stream=False) for prompt in prompts]
    asking = [
        asyncio.create_task(bench.ask(running, client, p, i % 2 == 0)) for i, p in enumerate(prompts[:25])
    ]
    await busiest(running, client)
    await act()
    for index, prompt in enumerate(prompts[25:]):
        asking.append(asyncio.create_task(bench.ask(running, client, prompt, index % 2 == 0)))
        await asyncio.sleep(0.05)
    report(case, [b.text for b in before], await asyncio.gather(*asking))


async def full(bench: Bench) -> None:
    async with bench.cluster("--max-running", "1", "--max-queue", "1") as (running, client):
        seen = await asyncio.gather(*(bench.ask(running, client, p, False) for p in bench.prompts(20)))
        refused = [outcome for outcome in seen if outcome.status == 429]
        row("full", "20 requests by status", dict(Counter(outcome.status for outcome in seen)))
        row(
            "full",
            "429 with Retry-After",
            f"{sum(o.retry_after is not None for o in refused)} of {len(refused)}",
        )


async def prefixes(bench: Bench, held: int = 4, count: int = 8, requests: int = 240) -> None:
    """A prefix takes 16 pages of 16 tokens; each of 6 clients may use 4 more."""
    flags = ("--pages", str(1 + held * 16 + 12), "--max-queue", "512")
    async with bench.cluster(*flags) as (running, client):
        shared = [await _of_tokens(running, client, 256, seed) for seed in range(count)]
        order = [index % count for index in range(requests)]
        random.Random(7).shuffle(order)
        asked = [BenchRequest(f"{shared[i]} {words(4, n)}", 16) for n, i in enumerate(order)]
        done = await running.metrics(client, "vllm:request_success_total")
        async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as http:
            records = await run_pass(http, running.model, asked, 6)
        hits = sum(await running.metrics(client, "vllm:prefix_cache_hits_total"))
        queries = sum(await running.metrics(client, "vllm:prefix_cache_queries_total"))
        after = await running.metrics(client, "vllm:request_success_total")
        each = [int(b - a) for a, b in zip(done, after, strict=True)]
        row("prefixes", "failed", sum(record.error is not None for record in records))
        row("prefixes", "share of prompt tokens cached", f"{hits / queries:.3f}")
        row("prefixes", "requests a worker, busiest / idlest", f"{each}, {max(each) / max(1, min(each)):.2f}")


async def _of_tokens(running: Cluster, client: httpx.AsyncClient, tokens: int, seed: int) -> str:
    """Return a text of about this many tokens, as counted by a worker."""
    long = words(tokens, seed)
    body = {"model": running.model, "prompt": long}
    counted = (await client.post(f"{running.urls[1]}/tokenize", json=body)).raise_for_status().json()["count"]
    return long[: int(len(long) * tokens / counted)]


async def cost(bench: Bench, turns: int = 5) -> None:
    """Alternate the same streams directly (a third at each worker) and through the router."""
    async with bench.cluster(router_flags=["--policy", "round_robin"]) as (running, _):
        requests = [BenchRequest(prompt, bench.tokens) for prompt in bench.prompts(bench.clients * 2)]
        places = {"direct": list(running.urls.values()), "router": [running.url]}
        gaps: dict[str, list[float]] = {name: [] for name in places}
        us_per_event = []
        for _turn in range(turns):
            for name, urls in places.items():
                before_s = cpu_s(running.router_pid())
                parts = [requests[index :: len(urls)] for index in range(len(urls))]
                passes = zip(urls, parts, strict=True)
                streams = await asyncio.gather(
                    *(_streams(url, running.model, part, bench.clients // len(urls)) for url, part in passes)
                )
                found = [gap for stream in streams for gap in stream]
                gaps[name] += found
                if name == "router":
                    us_per_event.append((cpu_s(running.router_pid()) - before_s) / len(found) * 1e6)
        direct, through = (statistics.median(gaps[name]) * 1e3 for name in places)
        row("cost", "gap between tokens, p50 ms: direct, through the router", f"{direct:.2f}, {through:.2f}")
        row("cost", "added p50, ms", f"{through - direct:.2f}")
        row("cost", "CPU of the router, us an event", f"{statistics.median(us_per_event):.0f}")


async def _streams(url: str, model: str, requests: Sequence[BenchRequest], clients: int) -> list[float]:
    """Return the gaps between tokens of all streams, in seconds."""
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        records = await run_pass(http, model, requests, clients)
    if failed := [record.error for record in records if record.error]:
        raise SystemExit(f"a stream failed: {failed[0]}")
    return [gap for record in records for gap in record.itl_s]


def cpu_s(pid: int) -> float:
    """Return the total CPU time of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def words(number: int, seed: int) -> str:
    """Return English-like text that differs from the first word on."""
    rng = random.Random(seed)
    sentences = (sentence(rng) for _ in range(number))
    return " ".join(" ".join(sentences).split()[:number])


CASES: dict[str, Case] = {
    "killed": killed,
    "drained": drained,
    "removed": removed,
    "full": full,
    "prefixes": prefixes,
    "cost": cost,
}


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", metavar="DIR", help="artefact of `shortfin-llm build`")
    parser.add_argument("--cases", default=",".join(CASES), help="cases to measure, separated by commas")
    parser.add_argument("--router", default="smg", help="smg or vllm-router (default: smg)")
    parser.add_argument("--threads", type=int, default=1, help="threads of a worker (default: 1)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of an answer (default: 200)")
    parser.add_argument(
        "--clients", type=int, default=9, help="clients at once of `cost`, a multiple of 3 (default: 9)"
    )
    parser.add_argument(
        "--router-flags",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="FLAG",
        help="the rest is the router's",
    )
    args = parser.parse_args()
    bench = Bench(
        args.directory, args.router, args.threads, args.tokens, args.clients, tuple(args.router_flags)
    )
    print("| case | what | measured |\n|---|---|---|", flush=True)
    for case in args.cases.split(","):
        await CASES[case](bench)


if __name__ == "__main__":
    asyncio.run(main())
