"""What grammars cost the streams of a server: those that have one, and those beside which some are compiled.

    python bench/structured_output.py DIR --repeat 5

DIR is an artefact of `shortfin-llm build`. Eight clients stream at once, 128 tokens in and 128 out, as in the
preset W2. Passes take turns: without a grammar; with a JSON schema of records; without a grammar while two
other clients send one hostile schema after another, each of which is refused. Printed are medians over the
repeats, and ratios to the pass without a grammar of the same repeat with their range. `--no-hostile` leaves
out the last of these passes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from running_server import running_server

from shortfin_apps.llm.tools.bench.load import BenchRequest, run_pass
from shortfin_apps.llm.tools.bench.prose import text
from shortfin_apps.llm.tools.bench.target import http_client

CLIENTS, PROMPT_WORDS, OUTPUT_TOKENS = 8, 100, 128
RECORD = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "population", "is_capital"],
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "population": {"type": "integer"},
        "is_capital": {"type": "boolean"},
    },
}
RECORDS = {"type": "array", "minItems": 100, "items": RECORD}  # longer than any answer here
PATTERNS = [{"type": "string", "pattern": f".*a.{{{length}}}b.*"} for length in range(20)]
HOSTILE: Sequence[dict[str, Any]] = (
    {"allOf": PATTERNS},  # never compiles
    {"oneOf": [{"const": number} for number in range(4_000)]},
    {"oneOf": [{"type": "object", "required": ["k"], "properties": {"k": {"const": f"{number}"}}}
               for number in range(700)]},
    {"allOf": [{"anyOf": [{"type": "string", "pattern": f"a{i}b{j}"} for i in range(100)]}
               for j in range(2)]},
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pass:
    """Tokens per second of all streams, and the gaps between their chunks in milliseconds."""

    tokens_per_s: float
    median_ms: float
    p99_ms: float


async def streams(http: httpx.AsyncClient, seed: str, fields: dict[str, Any]) -> Pass:
    requests = [
        BenchRequest(text(f"{seed}/{client}", PROMPT_WORDS), OUTPUT_TOKENS, fields)
        for client in range(CLIENTS)
    ]
    records = await run_pass(http, None, requests, CLIENTS)
    if failed := [record.error for record in records if record.error]:
        raise SystemExit(f"a stream failed: {failed[0]}")
    began_s, ended_s = min(r.sent_s for r in records), max(r.ended_s for r in records)
    gaps = sorted(after - before for r in records for before, after in pairwise(r.chunks_s))
    tokens = sum(record.output_tokens for record in records)
    return Pass(tokens / (ended_s - began_s), 1e3 * gaps[len(gaps) // 2], 1e3 * gaps[int(0.99 * len(gaps))])


async def beside_hostile(http: httpx.AsyncClient, seed: str) -> Pass:
    attackers = [asyncio.create_task(attack(http, f"{seed}/{number}")) for number in range(2)]
    try:
        return await streams(http, seed, {})
    finally:
        for attacker in attackers:
            attacker.cancel()
        await asyncio.gather(*attackers, return_exceptions=True)


async def attack(http: httpx.AsyncClient, seed: str) -> None:
    """Send schemas that are new each time, so that none is cached."""
    number = 0
    while True:
        schema = HOSTILE[number % len(HOSTILE)] | {"description": f"{seed}/{number}"}
        body = {"prompt": "a", "max_tokens": 1, "guided_json": schema}
        response = await http.post("/v1/completions", json=body)
        if response.status_code not in (200, 400, 429):
            raise SystemExit(f"a hostile schema was answered by {response.status_code}: {response.text}")
        number += 1


Measure = Callable[[httpx.AsyncClient, str], Coroutine[Any, Any, Pass]]
PASSES: dict[str, Measure] = {
    "no grammar": lambda http, seed: streams(http, seed, {}),
    "with a schema": lambda http, seed: streams(
        http, seed, {"guided_json": json.dumps(RECORDS), "ignore_eos": False}
    ),
    "beside hostile schemas": beside_hostile,
}


async def measured(url: str, names: Sequence[str], repeats: int) -> dict[str, list[Pass]]:
    results: dict[str, list[Pass]] = {name: [] for name in names}
    async with http_client(url, timeout_s=600) as http:
        for repeat in range(-1, repeats):  # the first warms up
            for name in list(names)[:: -1 if repeat % 2 else 1]:
                result = await PASSES[name](http, f"{repeat}/{name}")
                if repeat >= 0:
                    results[name].append(result)
    return results


def print_table(results: dict[str, list[Pass]]) -> None:
    print("| 8 streams | tok/s | of those without | ITL p50 ms | p99 ms | p99, of those without |")
    print("|---|---|---|---|---|---|")
    base = results["no grammar"]
    for name, passes in results.items():
        rates = [p.tokens_per_s / b.tokens_per_s for p, b in zip(passes, base, strict=True)]
        tails = [p.p99_ms / b.p99_ms for p, b in zip(passes, base, strict=True)]
        cells = [
            f"{statistics.median(p.tokens_per_s for p in passes):.0f}",
            with_range(rates),
            f"{statistics.median(p.median_ms for p in passes):.1f}",
            f"{statistics.median(p.p99_ms for p in passes):.1f}",
            with_range(tails),
        ]
        print(f"| {name} | {' | '.join(cells)} |")


def with_range(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path, metavar="DIR")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--no-hostile", action="store_true", help="leave out the pass beside hostile schemas")
    arguments = parser.parse_args()
    names = list(PASSES)[: 2 if arguments.no_hostile else None]
    with running_server([str(arguments.artifact), "--max-running", "16"]) as server:
        print_table(asyncio.run(measured(server.url, names, arguments.repeat)))


if __name__ == "__main__":
    main()
