"""Measures how a long prompt and running decodes slow each other down, in both batching modes.

    python bench/long_prefill.py DIR      # --streams 8, --prompt-tokens 4096, --token-budget 192

DIR is an artefact of `shortfin-llm build`. With a server in each mode, measures: the time of one invocation
of a whole token budget (in the default mode a decoding request waits for that and for a decode); the long
prompt's time to first token alone; the streams' inter-token times alone; then both at once. The ratio is the
streams' p99 inter-token time beside the long prompt, divided by the time of that invocation.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mode_servers import counted_since, counters, mode_servers

from shortfin_apps.llm.client import LlmClient
from shortfin_apps.llm.components.batching.modes.extend_attention import DEFAULT_EXTEND_BUDGET
from shortfin_apps.llm.tools.bench.stats import percentile

WARM_TOKENS = 40
QUIET_S = 2
NUM_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The parameters; `stream_tokens` exceeds what a stream generates before it is stopped."""

    streams: int
    prompt_tokens: int
    stream_tokens: int
    token_budget: int


@dataclass(frozen=True, kw_only=True)
class Result:
    step_ms: float
    quiet_ms: Sequence[float]
    beside_prefill_ms: Sequence[float]
    alone_s: float
    together_s: float


class Stream:
    """A client that streams until it is stopped, and records the arrival time of each token."""

    def __init__(self, client: LlmClient) -> None:
        self._client = client
        self.times: list[float] = []

    async def run(self, max_tokens: int) -> None:
        async for chunk in self._client.stream(
            new_prompt(32), max_tokens=max_tokens, temperature=0, ignore_eos=True
        ):
            if chunk.text or chunk.finish_reason is None:
                self.times.append(time.perf_counter())

    def gaps_ms(self, begin: float, end: float) -> list[float]:
        """Return the gaps between tokens that overlap [begin, end]."""
        return [(b - a) * 1e3 for a, b in itertools.pairwise(self.times) if b > begin and a < end]


def new_prompt(length: int) -> list[int]:
    """Return a prompt of low token ids, valid for every model, that shares no page with other prompts."""
    return random.Random(secrets.randbits(64)).choices(range(3, 203), k=length)


async def time_to_first_token(client: LlmClient, length: int) -> tuple[float, float]:
    """Return the times at which a prompt was sent and its first token arrived."""
    begin = time.perf_counter()
    await client.generate(new_prompt(length), max_tokens=1, temperature=0)
    return begin, time.perf_counter()


async def step_ms(client: LlmClient, url: str, tokens: int) -> float:
    """Return the mean time of an invocation of `tokens` at the start of a prompt, from server metrics."""
    before = counters(url)
    for _ in range(NUM_STEPS):
        await time_to_first_token(client, tokens)
    passed = counted_since(before, url)
    return passed["shortfin_llm:step_seconds_total"] / passed["shortfin_llm:steps_total"] * 1e3


async def measure(url: str, plan: Plan) -> Result:
    async with LlmClient(url) as client:
        one_step_ms = await step_ms(client, url, plan.token_budget)
        begin, end = await time_to_first_token(client, plan.prompt_tokens)
        alone_s = end - begin
        streams = [Stream(client) for _ in range(plan.streams)]
        running = [asyncio.create_task(stream.run(plan.stream_tokens)) for stream in streams]
        while min(len(stream.times) for stream in streams) < WARM_TOKENS:
            await asyncio.sleep(0.01)
        quiet = time.perf_counter()
        await asyncio.sleep(QUIET_S)
        begin, end = await time_to_first_token(client, plan.prompt_tokens)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return Result(
        step_ms=one_step_ms,
        quiet_ms=[gap for stream in streams for gap in stream.gaps_ms(quiet, begin)],
        beside_prefill_ms=[gap for stream in streams for gap in stream.gaps_ms(begin, end)],
        alone_s=alone_s,
        together_s=end - begin,
    )


def report(label: str, plan: Plan, result: Result) -> None:
    print(f"{label}: inter-token time of {plan.streams} streams, ms   p50     p99     max")
    gaps = {"nobody else": result.quiet_ms, f"{plan.prompt_tokens}-token prefill": result.beside_prefill_ms}
    for about, values in gaps.items():
        points = "".join(f"{percentile(values, point) or 0:8.1f}" for point in (50, 99, 100))
        print(f"  {about:<40}{points}")
    p99_ms = percentile(result.beside_prefill_ms, 99) or 0
    print(
        f"  {plan.token_budget} tokens in one invocation: {result.step_ms:.1f} ms, "
        f"so p99 is {p99_ms / result.step_ms:.2f} of that"
    )
    print(
        f"  time to first token of {plan.prompt_tokens} tokens: alone {result.alone_s:.2f} s, "
        f"beside the streams {result.together_s:.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path, metavar="DIR")
    parser.add_argument("--streams", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=4096, help="(default: %(default)s)")
    parser.add_argument("--stream-tokens", type=int, default=4000, help="(default: %(default)s)")
    parser.add_argument(
        "--token-budget", type=int, default=DEFAULT_EXTEND_BUDGET, help="(default: %(default)s)"
    )
    arguments = vars(parser.parse_args())
    artifact, plan = arguments.pop("artifact"), Plan(**arguments)
    with mode_servers(artifact, ["--token-budget", str(plan.token_budget)]) as servers:
        for label, url in servers.items():
            report(label, plan, asyncio.run(measure(url, plan)))


if __name__ == "__main__":
    main()
