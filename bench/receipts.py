"""Replays receipts that were made under load, alone and in the other batch mode: to the bit the same?

    python bench/receipts.py DIR                          # 1,000 receipts of the default mode
    python bench/receipts.py DIR --mode extend-attention --requests 200

A server with few pages, so that requests are preempted, answers many clients at once: prompts of several
lengths, half of which begin with one of a few prefixes; every other request is sampled, the rest is greedy.
Each answer's receipt is then replayed in this process, one at a time, with no prefix cached. Printed are the
server's own counts, and how many receipts differ; the exit status is 1 if any does. `--keep FILE` writes the
receipts, a line each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import httpx
from running_server import running_server

from shortfin_apps.llm.client import LlmClient
from shortfin_apps.llm.serving.receipts.receipt import Receipt
from shortfin_apps.llm.tools.replay.in_process import EXTEND, SCHEDULES, opened, replay

PREFIX_TOKENS, NUM_PREFIXES = 32, 4
OWN_TOKENS, FEW_TOKENS = 64, 12  # maximum own tokens of a prompt with a prefix, and without one
MODES = ("default", EXTEND)


def bodies(count: int, vocab_size: int, max_tokens: int, random: Random) -> list[dict[str, Any]]:
    """Return requests to `/generate`, half with a shared prefix, half with a short prompt."""

    def ids(length: int) -> list[int]:
        return [random.randrange(vocab_size) for _ in range(length)]

    prefixes = [ids(PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
    made = []
    for number in range(count):
        is_long = random.random() < 0.5
        prompt = (
            random.choice(prefixes) + ids(random.randint(1, OWN_TOKENS))
            if is_long
            else ids(random.randint(1, FEW_TOKENS))
        )
        sampling = {"max_tokens": random.randint(1, max_tokens), "ignore_eos": True}
        sampling |= {"temperature": random.choice([0.7, 1.0, 1.3]), "top_p": 0.95} if number % 2 else {}
        made.append({"input_ids": prompt, "sampling_params": sampling, "receipt": True})
    return made


async def answered(url: str, requests: list[dict[str, Any]], clients: int) -> list[Receipt]:
    receipts: list[Receipt] = []
    async with LlmClient(url, max_concurrency=clients) as client:

        async def one(body: dict[str, Any]) -> None:
            answer = await client.generate_native(body)
            [response] = answer["responses"]
            receipts.append(Receipt.parse(response["responses"][0]["meta_info"]["receipt"]))

        await asyncio.gather(*map(one, requests))
    return receipts


def counters(url: str) -> dict[str, float]:
    """Return the server's counts of preemptions and of prompt tokens found in its cache."""
    found = {}
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        name = line.partition("{")[0].removeprefix("shortfin_llm:").removeprefix("vllm:")
        if not line.startswith("#") and ("preemptions_total" in name or "prefix_cache_hits" in name):
            found[name] = float(line.rsplit(" ", 1)[1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path, metavar="DIR")
    parser.add_argument(
        "--mode", choices=MODES, default="default", help="of the server; the replay has the other"
    )
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--pages", type=int, default=16, help="of the server's KV cache")
    parser.add_argument("--max-tokens", type=int, default=40, help="of an output")
    parser.add_argument("--vocab-size", type=int, default=256, help="ids of prompts are below this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, metavar="FILE")
    args = parser.parse_args()
    requests = bodies(args.requests, args.vocab_size, args.max_tokens, Random(args.seed))
    flags = [str(args.artifact), "--batch-mode", args.mode, "--pages", str(args.pages)]
    with running_server(flags) as server:
        begin = time.monotonic()
        receipts = asyncio.run(answered(server.url, requests, args.clients))
        print(f"{len(receipts)} receipts in {time.monotonic() - begin:.0f} s, mode {args.mode}", flush=True)
        print(json.dumps(counters(server.url)), flush=True)
    if args.keep is not None:
        args.keep.write_text("".join(json.dumps(each.to_json()) + "\n" for each in receipts))
    other = SCHEDULES["alone" if args.mode == EXTEND else EXTEND]
    begin = time.monotonic()
    with opened(args.artifact, receipts) as subject:
        outcome = replay(subject, other)
    tokens = sum(len(each.output_ids) for each in receipts)
    print(
        f"replayed {tokens} tokens alone, mode {other.mode}, in {time.monotonic() - begin:.0f} s: "
        f"{len(outcome.differences)} of {len(receipts)} receipts differ"
    )
    for number, text in list(outcome.differences.items())[:9]:
        print(f"receipt {number} {text}")
    return 1 if outcome.differences or outcome.skipped else 0


if __name__ == "__main__":
    sys.exit(main())
