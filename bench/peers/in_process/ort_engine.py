"""onnxruntime-genai over HTTP, in static batches: runs in its own virtual environment.

Its continuous batching is for GPUs: on a CPU its Engine runs at most 4 requests at once, and takes no others
until all have ended. So requests that wait together are one batch of its Generator, of any size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import islice
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer

from bench.peers.in_process.arguments import Arguments, parse_arguments
from bench.peers.in_process.completions import serve

MAX_BATCH = 32
QUIET_S = 0.01  # clients that start together send within this time


class Batch(Protocol):
    """Requests that started together; `next_token_ids` computes one token for each, in order."""

    def next_token_ids(self) -> Sequence[int]: ...


class StaticBatches:
    """Runs one batch at a time: waiting requests with the same number of tokens as the first one."""

    quiet_s = QUIET_S

    def __init__(self, begin: Callable[[Sequence[Sequence[int]], int], Batch]) -> None:
        """`begin` is called with prompts and the number of tokens of each answer."""
        self._begin = begin
        self._waiting: dict[int, tuple[Sequence[int], int]] = {}
        self._batch: Batch | None = None
        self._keys: list[int] = []
        self._left_tokens = 0

    def add(self, key: int, prompt_token_ids: Sequence[int], max_tokens: int) -> None:
        self._waiting[key] = (prompt_token_ids, max_tokens)

    def step(self) -> list[tuple[int, int]]:
        batch = self._batch or self._next_batch()
        produced = list(zip(self._keys, batch.next_token_ids(), strict=True))
        self._left_tokens -= 1
        self._batch = batch if self._left_tokens else None
        return produced

    def is_busy(self) -> bool:
        return self._batch is not None or bool(self._waiting)

    def _next_batch(self) -> Batch:
        self._left_tokens = max_tokens = next(iter(self._waiting.values()))[1]
        alike = (key for key, (_, wanted) in self._waiting.items() if wanted == max_tokens)
        self._keys = list(islice(alike, MAX_BATCH))
        prompts = [self._waiting.pop(key)[0] for key in self._keys]
        return self._begin(prompts, max_tokens)


class GeneratorBatch:
    """A batch of the Generator. Its first token requires computing the prompts."""

    def __init__(self, generator: Any, rows: Any) -> None:
        self._generator = generator
        self._rows = rows

    def next_token_ids(self) -> Sequence[int]:
        if self._rows is not None:
            self._generator.append_tokens(self._rows)
            self._rows = None
        self._generator.generate_next_token()
        return [int(token_id) for token_id in self._generator.get_next_tokens()]


def padded(prompts: Sequence[Sequence[int]], pad_token_id: int) -> list[list[int]]:
    """Pad rows to the same length, on the right, as the exported attention counts from the left."""
    length = max(map(len, prompts))
    return [[*prompt, *[pad_token_id] * (length - len(prompt))] for prompt in prompts]


class Generators:
    """Starts batches of a model with the engine's module `genai`."""

    def __init__(self, genai: Any, arguments: Arguments) -> None:
        self._genai = genai
        self._model = genai.Model(config(genai, arguments))
        described = json.loads((arguments.model / "genai_config.json").read_bytes())
        self._pad_token_id = described["model"]["pad_token_id"]

    def __call__(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Batch:
        rows = np.array(padded(prompts, self._pad_token_id), np.int32)
        length = rows.shape[1] + max_tokens
        params = self._genai.GeneratorParams(self._model)
        # No row ends before `min_length`.
        params.set_search_options(batch_size=len(rows), min_length=length, max_length=length, do_sample=False)
        generator = self._genai.Generator(self._model, params)
        return GeneratorBatch(generator, rows if len(rows) > 1 else rows[0])


def config(genai: Any, arguments: Arguments) -> Any:
    made = genai.Config(str(arguments.model))
    options = {"intra_op_num_threads": arguments.threads}
    made.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
    return made


def main() -> None:
    arguments = parse_arguments(__doc__)
    engine = StaticBatches(Generators(import_module("onnxruntime_genai"), arguments))
    serve(engine, Tokenizer.from_file(str(arguments.model / "tokenizer.json")), arguments.port)


if __name__ == "__main__":
    main()
