"""Tokens per second of servers, each asked the same of bench/speculation.py's tasks for one client, in turns.

    python -m bench.speculation_servers off=http://127.0.0.1:8000 ngram=http://127.0.0.1:8001 --repeat 5

For servers with OpenAI's `/v1/chat/completions`: this one with and without `--speculative`, llama.cpp's with
and without `--spec-type`. A time is that of the whole answer, its prompt included, which may be cached.
Printed are medians, and the ratio of each server to the first one in the same turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from bench.speculation import GREEDY, QUESTIONS, SAMPLED


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("servers", nargs="+", metavar="NAME=URL", help="servers that run")
    parser.add_argument("--tasks", default=",".join(QUESTIONS), metavar="NAME,...")
    parser.add_argument("--tokens", type=int, default=192, help="of an answer at most")
    parser.add_argument("--repeat", type=int, default=5, help="turns")
    arguments = parser.parse_args()
    servers = dict(server.split("=", 1) for server in arguments.servers)
    print("| task | server | tok/s | to the first |")
    print("|---|---|---|---|")
    for task in arguments.tasks.split(","):
        speeds = _turns(servers, task, arguments.tokens, arguments.repeat)
        first = next(iter(speeds.values()))
        for name, of_turns in speeds.items():
            ratios = sorted(speed / base for speed, base in zip(of_turns, first, strict=True))
            spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            print(f"| {task} | {name} | {statistics.median(of_turns):.0f} | {spread} |", flush=True)


def _turns(servers: Mapping[str, str], task: str, tokens: int, repeat: int) -> Mapping[str, Sequence[float]]:
    """Return tokens/s of each server and turn, after an unmeasured turn."""
    speeds: dict[str, list[float]] = {name: [] for name in servers}
    for turn in range(repeat + 1):
        for name in servers if turn % 2 else reversed(servers):
            speed = _ask(servers[name], task, tokens, seed=turn)
            if turn:
                speeds[name].append(speed)
    return speeds


def _ask(url: str, task: str, tokens: int, seed: int) -> float:
    sampling: Mapping[str, Any] = {**SAMPLED, "seed": seed} if task == "story" else GREEDY
    message = {"role": "user", "content": QUESTIONS[task]()}
    body = {"model": _model(url), "messages": [message], "max_tokens": tokens, **sampling}
    asked = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began_s = time.perf_counter()
    with urllib.request.urlopen(asked) as answer:
        usage = json.load(answer)["usage"]
    completed: int = usage["completion_tokens"]
    return completed / (time.perf_counter() - began_s)


def _model(url: str) -> str:
    """Return the id of the server's first model."""
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        name: str = json.load(answer)["data"][0]["id"]
    return name


if __name__ == "__main__":
    main()
