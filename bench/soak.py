"""Soak test: many clients for a long time; a third disconnect early and a tenth send invalid requests.

    python bench/soak.py DIR --minutes 15                              # a server on too few pages
    python bench/soak.py DIR --minutes 1 --batch-mode extend-attention

DIR is an artefact of `shortfin-llm build`. Starts a server with too few KV pages for its clients, so that
requests are preempted, and keeps it busy until the time is over. Then checks that there were no errors other
than the clients' own, that memory did not grow, that every page was freed, and that `/health` is 200. Prints
each check with its measurement, and exits with 1 if one fails.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from running_server import RunningServer, running_server

from shortfin_apps.llm.tools.bench.workload import text

DISCONNECTS, NONSENSE, STREAMS = 0.3, 0.1, 0.7
MAX_OUTPUT_TOKENS = 96
MAX_GROWTH = 0.02
PATIENCE_S = 600.0  # for one answer
SAMPLE_S = 0.5
WARM_UP, WARM_UP_S = 0.2, 30.0  # share of the time, and minimum: until everything bounded was filled once
PREFIXES = [text(f"prefix {number}", 40) for number in range(4)]

BAD_BODIES: list[dict[str, Any]] = [
    {"prompt": "hello", "max_tokens": -1},
    {"prompt": "hello", "max_tokens": 10**9},
    {"prompt": "hello", "temperature": "hot"},
    {"prompt": [10**9]},
    {"prompt": "hello", "n": 10**6},
    {"prompt": "hello", "stop": ["x"] * 1000},
    {"prompt": None},
    {},
]


def counters(url: str) -> dict[str, float]:
    """Return samples of `/metrics` by name, summed over entries; computed rows by their `kind`."""
    exposition = httpx.get(f"{url}/metrics", trust_env=False).raise_for_status().text
    found: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            found[sample.labels.get("kind", sample.name)] += sample.value
    return found


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request; the client may leave after a number of stream events or of seconds."""

    path: str
    body: dict[str, Any]
    is_bad: bool = False
    leaves_after_events: int | None = None
    leaves_after_s: float | None = None


@dataclass
class Tally:
    """Outcomes of all requests, and errors among them."""

    outcomes: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)
    num_files: list[int] = field(default_factory=list)

    def wrong(self, ask: Ask, what: str) -> None:
        self.outcomes["wrong"] += 1
        self.errors.append(f"{ask.path} {str(ask.body)[:120]}: {what}")


def draw(rng: random.Random, max_tokens: int) -> Ask:
    """Return a random request of at most `max_tokens` tokens in prompt and output."""
    if rng.random() < NONSENSE:
        body = {"stream": rng.random() < STREAMS, **rng.choice(BAD_BODIES)}
        return Ask(path="/v1/completions", body=body, is_bad=True)
    body = {
        "max_tokens": rng.randint(1, MAX_OUTPUT_TOKENS),
        "temperature": rng.choice([0.0, 0.7]),
        "stream": rng.random() < STREAMS,
        "ignore_eos": rng.random() < 0.5,
    }
    # A token is at least one character, so no prompt is too long; most are short.
    longest = min(2400, max_tokens - 2 * MAX_OUTPUT_TOKENS)
    prompt = text(f"{rng.random()}", longest)[: round(longest ** rng.random())]
    if rng.random() < 0.5:
        prompt = (rng.choice(PREFIXES) + prompt)[:longest]
    ask = Ask(path="/v1/completions", body={"prompt": prompt, **body})
    if rng.random() < 0.5:
        messages = [{"role": "user", "content": prompt}]
        ask = Ask(path="/v1/chat/completions", body={"messages": messages, **body})
    if rng.random() >= DISCONNECTS:
        return ask
    if body["stream"] and rng.random() < 0.5:
        return Ask(path=ask.path, body=ask.body, leaves_after_events=rng.randrange(8))
    return Ask(path=ask.path, body=ask.body, leaves_after_s=rng.random() ** 3)


async def send(http: httpx.AsyncClient, ask: Ask, tally: Tally) -> None:
    try:
        async with asyncio.timeout(ask.leaves_after_s):
            async with http.stream("POST", ask.path, json=ask.body) as response:
                await read(response, ask, tally)
    except TimeoutError:
        tally.outcomes["left before the answer"] += 1
    except httpx.HTTPError as error:
        tally.wrong(ask, repr(error))


async def read(response: httpx.Response, ask: Ask, tally: Tally) -> None:
    if ask.is_bad or response.status_code != 200:
        body = (await response.aread()).decode()
        if ask.is_bad and response.status_code in (400, 413, 422):
            tally.outcomes["nonsense, and told so"] += 1
        else:
            tally.wrong(ask, f"{response.status_code} {body[:300]}")
        return
    events = 0
    last = ""
    async for line in response.aiter_lines():
        if events == ask.leaves_after_events:
            tally.outcomes["left in the middle"] += 1
            return
        last = line or last
        events += bool(line)
        if '"error"' in line:
            tally.wrong(ask, line[:300])
            return
    if ask.body["stream"] and last != "data: [DONE]":
        tally.wrong(ask, f"the stream ended with {last[:300]!r}")
        return
    tally.outcomes["answered"] += 1


async def client(url: str, rng: random.Random, tally: Tally, until_s: float, max_tokens: int) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False) as http:
        while time.monotonic() < until_s:
            await send(http, draw(rng, max_tokens), tally)


async def watch(server: RunningServer, tally: Tally, until_s: float) -> None:
    while time.monotonic() < until_s:
        tally.rss_bytes.append(server.rss_bytes())
        tally.num_files.append(server.num_files())
        await asyncio.sleep(SAMPLE_S)


async def soak(server: RunningServer, clients: int, seconds: float, seed: int) -> Tally:
    asked = httpx.post(f"{server.url}/tokenize", json={"prompt": "a"}, trust_env=False)
    max_tokens = asked.raise_for_status().json()["max_model_len"]
    tally = Tally()
    until_s = time.monotonic() + seconds
    asking = [
        client(server.url, random.Random(f"{seed}/{number}"), tally, until_s, max_tokens)
        for number in range(clients)
    ]
    await asyncio.gather(watch(server, tally, until_s), *asking)
    return tally


def thirds(samples: Sequence[float]) -> tuple[float, float]:
    """Return the means of the first and the last third of the samples after the warm-up."""
    warm_up = max(len(samples) * WARM_UP, min(len(samples) / 2, WARM_UP_S / SAMPLE_S))
    warm = samples[round(warm_up) :]
    third = max(1, len(warm) // 3)
    return fmean(warm[:third]), fmean(warm[-third:])


def all_freed(url: str) -> dict[str, float]:
    """Return the counters once no request is left, or after a timeout."""
    give_up_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up_s:
        found = counters(url)
        if not found["vllm:num_requests_running"] and not found["vllm:num_requests_waiting"]:
            break
        time.sleep(SAMPLE_S)
    return found


def verdicts(server: RunningServer, tally: Tally) -> list[tuple[bool, str]]:
    """Return the checks: whether each holds, and its expectation with the measurement."""
    found = all_freed(server.url)
    pages, leased = found["shortfin_llm:pages"], found["shortfin_llm:pages_leased"]
    whole = found["shortfin_llm:pages_free"] + found["shortfin_llm:pages_cached"]
    first, last = thirds(tally.rss_bytes)
    files = thirds(tally.num_files)
    healthy = httpx.get(f"{server.url}/health", trust_env=False).status_code
    preemptions = found["vllm:num_preemptions_total"]
    return [
        (not tally.errors, f"no error but the clients' own: {len(tally.errors)}"),
        (preemptions > 0, f"requests were set back to free pages: {preemptions:g} times"),
        (leased == 0 and whole == pages, f"every page is back: {whole:g} of {pages:g}, {leased:g} in use"),
        (
            last <= first * (1 + MAX_GROWTH),
            f"memory is flat: {first / 2**20:.1f} MiB, then {last / 2**20:.1f} ({last / first - 1:+.2%})",
        ),
        (files[1] <= files[0] * 1.5, f"so are open files: {files[0]:.0f}, then {files[1]:.0f}"),
        (healthy == 200, f"/health: {healthy}"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path, metavar="DIR")
    parser.add_argument("--minutes", type=float, default=15.0, help="(default: %(default)s)")
    parser.add_argument("--clients", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--pages", type=int, default=48, help="of the KV cache (default: %(default)s)")
    parser.add_argument("--batch-mode", default="default", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is asked (default: %(default)s)")
    arguments = parser.parse_args()
    flags = [str(arguments.artifact), "--pages", str(arguments.pages), "--batch-mode", arguments.batch_mode]
    with running_server(flags) as server:
        tally = asyncio.run(soak(server, arguments.clients, arguments.minutes * 60, arguments.seed))
        found = verdicts(server, tally)
        found.append((server.stop() == 0, "the server stopped when it was told to"))
    print(", ".join(f"{count} {outcome}" for outcome, count in tally.outcomes.most_common()))
    for error in tally.errors[:10]:
        print(f"  {error}")
    for holds, what in found:
        print(f"{'ok ' if holds else 'NOT'} {what}")
    return 0 if all(holds for holds, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main())
