"""OpenVINO GenAI's continuous batching over HTTP: runs in its own virtual environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from bench.peers.in_process.arguments import Arguments, parse_arguments
from bench.peers.in_process.completions import serve
from bench.peers.in_process.stepping import Engine

CACHE_GIB = 2  # of keys and values, the same as for vLLM
MAX_RUNNING = 32


class OpenVinoEngine:
    """Steps a ContinuousBatchingPipeline.

    `as_input` converts token ids to its tensor; `as_config` makes its settings for a number of tokens.
    """

    quiet_s = 0.0

    def __init__(
        self,
        pipeline: Any,
        as_input: Callable[[Sequence[int]], Any],
        as_config: Callable[[int], Any],
    ) -> None:
        self._pipeline = pipeline
        self._as_input = as_input
        self._as_config = as_config
        self._handles: dict[int, Any] = {}
        self._left_tokens: dict[int, int] = {}

    def add(self, key: int, prompt_token_ids: Sequence[int], max_tokens: int) -> None:
        self._handles[key] = self._pipeline.add_request(
            key, self._as_input(prompt_token_ids), self._as_config(max_tokens)
        )
        self._left_tokens[key] = max_tokens

    def step(self) -> list[tuple[int, int]]:
        self._pipeline.step()
        return [pair for key in list(self._handles) for pair in self._read(key)]

    def is_busy(self) -> bool:
        return bool(self._handles)

    def _read(self, key: int) -> list[tuple[int, int]]:
        handle, produced = self._handles[key], list[tuple[int, int]]()
        while handle.can_read():
            for output in handle.read().values():
                produced += [(key, token_id) for token_id in output.generated_ids]
        self._left_tokens[key] -= len(produced)
        if self._left_tokens[key] <= 0:
            del self._handles[key], self._left_tokens[key]
        return produced


def open_engine(arguments: Arguments) -> Engine:
    genai, openvino = map(import_module, ("openvino_genai", "openvino"))
    pipeline = genai.ContinuousBatchingPipeline(
        arguments.model, scheduler_config(genai), "CPU", device_properties(arguments)
    )
    return OpenVinoEngine(
        pipeline,
        lambda prompt: openvino.Tensor(np.array([prompt], np.int64)),
        lambda max_tokens: generation_config(genai, max_tokens),
    )


def generation_config(genai: Any, max_tokens: int) -> Any:
    """Return settings for greedy decoding of exactly `max_tokens`."""
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
    return config


def scheduler_config(genai: Any) -> Any:
    """Return settings of the batches, with cached prefixes, as in all servers."""
    config = genai.SchedulerConfig()
    config.cache_size, config.enable_prefix_caching = CACHE_GIB, True
    config.max_num_seqs = MAX_RUNNING
    return config


def device_properties(arguments: Arguments) -> dict[str, object]:
    precision = {"INFERENCE_PRECISION_HINT": arguments.precision} if arguments.precision else {}
    return {"INFERENCE_NUM_THREADS": arguments.threads, **precision}


def main() -> None:
    arguments = parse_arguments(__doc__)
    engine = open_engine(arguments)
    serve(engine, Tokenizer.from_file(str(arguments.model / "tokenizer.json")), arguments.port)


if __name__ == "__main__":
    main()
