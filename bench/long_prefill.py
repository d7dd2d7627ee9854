"""What a long prompt costs the running streams, and what they cost it.

    shortfin-llm serve DIR            # in another terminal, in either batch mode
    python bench/long_prefill.py      # --url, --streams 8, --prompt-tokens 4096

Measures, in one run: the streams' inter-token times with nobody else there; the long prompt's time to
first token alone; then both at once.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import secrets
import statistics
import time
from collections.abc import Sequence

from shortfin_apps.llm.client import LlmClient

STREAM_TOKENS = 4000  # more than any stream here lives to see
WARM_TOKENS = 40


class Stream:
    """One client that decodes until it is told to stop, and notes when each token came."""

    def __init__(self, client: LlmClient, seed: int) -> None:
        self._client = client
        self._prompt = prompt_ids(32, seed)
        self.times: list[float] = []

    async def run(self) -> None:
        async for chunk in self._client.stream(
            self._prompt, max_tokens=STREAM_TOKENS, temperature=0, ignore_eos=True
        ):
            if chunk.text or chunk.finish_reason is None:
                self.times.append(time.perf_counter())

    def gaps_ms(self, begin: float, end: float) -> list[float]:
        """Between tokens, of those gaps that overlap [begin, end]."""
        return [(b - a) * 1e3 for a, b in itertools.pairwise(self.times) if b > begin and a < end]


def prompt_ids(length: int, seed: int) -> list[int]:
    """Ids that no other prompt of this run, or of an earlier one, shares a page with."""
    return [100 + (seed * 7919 + i * 31) % 20000 for i in range(length)]


async def time_to_first_token(client: LlmClient, length: int, seed: int) -> tuple[float, float]:
    begin = time.perf_counter()
    await client.generate(prompt_ids(length, seed), max_tokens=1, temperature=0)
    return begin, time.perf_counter()


async def measure(url: str, num_streams: int, length: int) -> None:
    base = secrets.randbelow(10**6)
    async with LlmClient(url) as client:
        begin, end = await time_to_first_token(client, length, base)
        alone_s = end - begin
        streams = [Stream(client, base + 1 + i) for i in range(num_streams)]
        running = [asyncio.create_task(stream.run()) for stream in streams]
        while min(len(stream.times) for stream in streams) < WARM_TOKENS:
            await asyncio.sleep(0.01)
        quiet = time.perf_counter()
        await asyncio.sleep(2)
        begin, end = await time_to_first_token(client, length, base + 1000)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    before = [gap for stream in streams for gap in stream.gaps_ms(quiet, begin)]
    during = [gap for stream in streams for gap in stream.gaps_ms(begin, end)]
    report(num_streams, length, before, during, alone_s, end - begin)


def report(
    num_streams: int,
    length: int,
    before: Sequence[float],
    during: Sequence[float],
    alone_s: float,
    together_s: float,
) -> None:
    print(f"inter-token time of {num_streams} streams, ms   p50     p99     max")
    for label, gaps in (("nobody else", before), (f"{length}-token prefill", during)):
        ordered = sorted(gaps)
        p99 = ordered[int(len(ordered) * 0.99)]
        print(f"  {label:<30} {statistics.median(ordered):7.1f} {p99:7.1f} {ordered[-1]:7.1f}")
    print(f"time to first token of {length} tokens: alone {alone_s:.2f} s, beside them {together_s:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.url, arguments.streams, arguments.prompt_tokens))


if __name__ == "__main__":
    main()
