"""Tokens and times of an artefact's engine on a device, where only the runtime is installed.

    python bench/on_device.py CPU_DIR --save tokens.json
    python bench/on_device.py DIR --device cuda --expect tokens.json

Prompts are random and their continuations greedy. Each batch size runs its prompts together, so milliseconds
are those of the whole engine's steps. `--save` writes the tokens of the first batch size; `--expect` counts,
for each prompt, those that are the same up to the first difference.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.loading import EngineOptions, make_engine
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.runtime.open import open_device

SEED = 7


def main() -> int:
    args = _parse()
    artifact = Artifact.open(args.directory)
    options = EngineOptions(device=args.device, runtime=args.runtime, prefix_cache="none")
    with closing(open_device(args.device, args.runtime)) as device:
        begin = time.perf_counter()
        engine = make_engine(
            device, artifact.config, artifact.vmfb, artifact.parameters, frozenset(), options
        )
        print(json.dumps({"device": device.name, "load_s": round(time.perf_counter() - begin, 2)}))
        first: list[list[int]] | None = None
        for size in args.batch_sizes:
            tokens, steps = _run(engine, _prompts(artifact, size, args.prompt_tokens), args.tokens)
            first = first or tokens
            print(json.dumps(_times(size, steps)), flush=True)
    if args.save:
        args.save.write_text(json.dumps(first))
    return _compare(first or [], json.loads(args.expect.read_text())) if args.expect else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runtime", choices=("auto", "shortfin", "iree"), default="auto")
    parser.add_argument(
        "--batch-sizes", type=lambda text: [int(n) for n in text.split(",")], default=[4, 1, 32]
    )
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--expect", type=Path)
    return parser.parse_args()


def _prompts(artifact: Artifact, count: int, length: int) -> list[tuple[int, ...]]:
    assert artifact.vocab_size is not None
    random = np.random.default_rng(SEED)
    return [tuple(random.integers(0, artifact.vocab_size, length).tolist()) for _ in range(count)]


def _run(
    engine: Engine, prompts: Sequence[tuple[int, ...]], max_tokens: int
) -> tuple[list[list[int]], list[float]]:
    """The tokens of each prompt, and the seconds of each step."""
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    for index, prompt in enumerate(prompts):
        engine.add(GenerateCall(request_id=str(index), prompt_token_ids=prompt, params=params))
    seconds = []
    while engine.has_work:
        begin = time.perf_counter()
        deltas = engine.step()
        seconds.append(time.perf_counter() - begin)
        for delta in deltas:
            if delta.error is not None:
                raise delta.error
            tokens[delta.request_id] += delta.token_ids
    return list(tokens.values()), seconds


def _times(size: int, steps: Sequence[float]) -> dict[str, float]:
    """Most steps decode, so the median is a decode step's."""
    decode = statistics.median(steps)
    return {
        "requests": size,
        "decode_ms": round(decode * 1e3, 3),
        "decode_tokens_per_s": round(size / decode),
    }


def _compare(tokens: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> int:
    """Prints how many tokens are as expected. 1 if any prompt's first token is not."""
    agreed = [
        next((i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), len(want))
        for got, want in zip(tokens, expected, strict=True)
    ]
    print(json.dumps({"tokens_as_expected": agreed, "of": len(expected[0])}))
    return int(min(agreed) == 0)


if __name__ == "__main__":
    sys.exit(main())
