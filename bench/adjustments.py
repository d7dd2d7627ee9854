"""What penalties and biases cost: beside requests without, which are sampled alike.

    python bench/adjustments.py DIR --repeat 6            # the engine alone, in this process
    python bench/adjustments.py DIR --repeat 6 --http     # a server with eight clients, as in the preset W2

DIR is an artefact of `shortfin-llm build`. Eight requests at once, 128 tokens in and 128 out; passes take
turns. Printed are medians over the repeats: tokens per second, their ratio to the pass without of the same
repeat with its range, and, of the engine alone, the processor time of its thread for a token, which what else
the machine does changes less. That thread computes a part of the model where the device is a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from running_server import running_server
from structured_output import CLIENTS, OUTPUT_TOKENS, streams, with_range

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.runtime.open import open_device
from shortfin_apps.llm.serving.loading import EngineOptions, make_engine
from shortfin_apps.llm.tools.bench.target import http_client

Fields = Mapping[str, Any]
PROMPT_TOKENS = 128
SAMPLED: Mapping[str, Fields] = {
    "greedy": {"temperature": 0.0},
    "top_k 40": {"temperature": 1.0, "top_k": 40, "seed": 1},
    "temperature 1": {"temperature": 1.0, "seed": 1},
    "top_p 0.9": {"temperature": 1.0, "top_p": 0.9, "seed": 1},
}
ADJUSTED: Mapping[str, Fields] = {
    "": {},
    "presence_penalty": {"presence_penalty": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "20 biases": {"logit_bias": {str(37 * i): -1.0 for i in range(20)}},
    "all of these": {
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {str(37 * i): -1.0 for i in range(20)},
    },
    "negative presence_penalty": {"presence_penalty": -0.1},
}


@dataclass(frozen=True, slots=True)
class Turn:
    tokens_per_s: float
    thread_us: float = 0.0  # CPU time of the engine's thread per token


Measure = Callable[[Fields, int], Turn]


def through_engine(engine: Engine, fields: Fields, repeat: int) -> Turn:
    """Measure the decodes of a batch, after its prefills."""
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, **_of_engine(fields))
    for row in range(CLIENTS):
        prompt = tuple((977 * (row + 8 * repeat) + 31 * i) % 32_000 for i in range(PROMPT_TOKENS))
        engine.add(GenerateCall(request_id=str(row), prompt_token_ids=prompt, params=params))
    num_generated = 0
    while num_generated < 4 * CLIENTS:
        num_generated += _step(engine)
    measured, began_s, thread_s = 0, time.perf_counter(), time.thread_time()
    while engine.has_work:
        measured += _step(engine)
    thread_us = 1e6 * (time.thread_time() - thread_s) / measured
    return Turn(measured / (time.perf_counter() - began_s), thread_us)


def _of_engine(fields: Fields) -> dict[str, Any]:
    biases = fields.get("logit_bias", {})
    return {**fields, "logit_bias": tuple((int(name), bias) for name, bias in biases.items())}


def _step(engine: Engine) -> int:
    deltas = engine.step()
    if failed := [delta.error for delta in deltas if delta.error]:
        raise SystemExit(f"a request failed: {failed[0]}")
    return sum(len(delta.token_ids) for delta in deltas)


def through_http(url: str, fields: Fields, repeat: int) -> Turn:
    async def run() -> Turn:
        async with http_client(url, timeout_s=600) as http:
            return Turn((await streams(http, f"{repeat}/{fields}", dict(fields))).tokens_per_s)

    return asyncio.run(run())


def measured(measure: Measure, sampled: Fields, names: Sequence[str], repeats: int) -> dict[str, list[Turn]]:
    """Measure each of the `names` in every repeat; the first repeat warms up and is dropped."""
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for repeat in range(-1, repeats):
        for name in list(names)[:: -1 if repeat % 2 else 1]:
            turn = measure({**sampled, **ADJUSTED[name]}, repeat + 1)
            if repeat >= 0:
                turns[name].append(turn)
    return turns


def print_table(measure: Measure, names: Sequence[str], repeats: int) -> None:
    print("| 8 streams | adjusted by | tok/s | of those without | engine's thread, us a token |")
    print("|---|---|---|---|---|")
    for kind, sampled in SAMPLED.items():
        turns = measured(measure, sampled, names, repeats)
        for name in names:
            pairs = zip(turns[name], turns[""], strict=True)
            ratio = with_range([turn.tokens_per_s / base.tokens_per_s for turn, base in pairs])
            speed = statistics.median(turn.tokens_per_s for turn in turns[name])
            thread_us = statistics.median(turn.thread_us for turn in turns[name])
            print(f"| {kind} | {name or 'nothing'} | {speed:.0f} | {ratio} | {thread_us:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path, metavar="DIR")
    parser.add_argument("--repeat", type=int, default=6)
    parser.add_argument("--http", action="store_true", help="measure a server")
    parser.add_argument("--by", default=",".join(ADJUSTED), metavar="NAME,...", help="of the adjustments")
    parser.add_argument("--device", default="cpu", help="as for `serve`")
    arguments = parser.parse_args()
    names = ["", *(name for name in arguments.by.split(",") if name)]
    if arguments.http:
        with running_server([str(arguments.artifact), "--device", arguments.device]) as server:
            print_table(partial(through_http, server.url), names, arguments.repeat)
    else:
        measure_engine(arguments.artifact, arguments.device, names, arguments.repeat)


def measure_engine(directory: Path, device_name: str, names: Sequence[str], repeats: int) -> None:
    device, artifact = open_device(device_name), Artifact.open(directory)
    options = EngineOptions(prefix_cache="none")
    try:
        engine = make_engine(
            device, artifact.config, artifact.vmfb, artifact.parameters, frozenset(), options
        )
        print_table(partial(through_engine, engine), names, repeats)
    finally:
        device.close()


if __name__ == "__main__":
    main()
