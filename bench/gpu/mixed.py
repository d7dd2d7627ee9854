"""The engine in process under mixed traffic: requests of all lengths end and arrive all the time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from bench.gpu.engine import SEED
from bench.gpu.json_grammar import json_grammar
from bench.gpu.models import Model
from bench.gpu.recorded_traffic import RecordedTraffic
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.runtime.device import Device
from shortfin_apps.llm.model.config import model_config

CLIENTS = 64
SHORTEST, LONGEST = 16, 512  # tokens of a prompt
OUTPUT_TOKENS = 64
ROUNDS = 2  # measured requests per client, after one that is not measured
GRAMMAR = "JSON schema"
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "whole vocabulary": {"temperature": 1.0},
    "presence penalty": {"temperature": 1.0, "presence_penalty": 0.5},
    "logprobs": {"temperature": 1.0, "logprobs": 5},
    GRAMMAR: {"temperature": 1.0},
}
PLAIN = ("greedy", "whole vocabulary")  # of SAMPLINGS


@dataclass(slots=True)
class Traffic:
    """Seconds of each measured step, and what the engine did meanwhile.

    `back_to_back_s` is how long the same invocations take without an engine, if that was measured.
    """

    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    requests: int = 0
    device_s: float = 0.0
    steps_ahead: int = 0
    discarded_tokens: int = 0
    back_to_back_s: float | None = None

    def record(self) -> dict[str, Any]:
        total, steps = sum(self.seconds), len(self.seconds)
        return {
            "steps": steps,
            "step_ms": statistics.median(self.seconds) * 1e3,
            "step_ms_p99": float(np.percentile(self.seconds, 99)) * 1e3,
            "host_ms": (total - self.device_s) / steps * 1e3,
            "ahead": self.steps_ahead / steps,
            "discarded_tokens": self.discarded_tokens,
            "requests_per_s": self.requests / total,
            "tokens_per_s": self.tokens / total,
            "busy": None if self.back_to_back_s is None else self.back_to_back_s / total,
        }


def clients(model: Model) -> int:
    """Return how many requests there are at any time."""
    return min(CLIENTS, *model.options.decode_batch_sizes[-1:])


def pages(model: Model) -> int:
    """Return the number of pages for the longest requests of all clients, plus the scratch page."""
    stride = model.options.block_seq_stride
    return 1 + clients(model) * (-(-(_longest(model) + OUTPUT_TOKENS) // stride) + 2)


def measure(engine: Engine, model: Model, sampling: str) -> Traffic:
    """Measure steps from the end of the first round of requests on. `sampling` is a key of SAMPLINGS.

    Whenever a request ends, another one arrives, until the last measured request has ended. Raises LlmError.
    """
    count = clients(model)
    calls = _calls(model, sampling, count)
    for call in islice(calls, count):
        engine.add(call)
    _serve(engine, calls, count)
    before = engine.stats()
    traffic = _serve(engine, calls, ROUNDS * count)
    after = engine.stats()
    traffic.device_s = after.device_s - before.device_s
    traffic.steps_ahead = after.steps_ahead - before.steps_ahead
    traffic.discarded_tokens = after.discarded_tokens - before.discarded_tokens
    while engine.has_work:
        engine.step()
    return traffic


def back_to_back_s(
    engine: Engine, model: Model, sampling: str, program: RecordedTraffic, device: Device
) -> float:
    """Return the seconds that the measured invocations of `measure` take the device without an engine.

    Another run, as recording costs memory and time. `program` must be the engine's.
    """
    count = clients(model)
    calls = _calls(model, sampling, count)
    for call in islice(calls, count):
        engine.add(call)
    _serve(engine, calls, count)
    program.start()
    _serve(engine, calls, ROUNDS * count)
    program.stop()
    while engine.has_work:
        engine.step()
    return program.replay_s(device)


def _serve(engine: Engine, calls: Iterator[GenerateCall], num_requests: int) -> Traffic:
    """Step until so many requests have ended, and replace each by another."""
    traffic = Traffic()
    while traffic.requests < num_requests:
        begin = time.perf_counter()
        for delta in engine.step():
            if delta.error is not None:
                raise delta.error
            traffic.tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                traffic.requests += 1
                engine.add(next(calls))
        traffic.seconds.append(time.perf_counter() - begin)
    return traffic


def _calls(model: Model, sampling: str, count: int) -> Iterator[GenerateCall]:
    """Yield requests without end; the outputs of the first `count` are shorter, so that they end in turn."""
    random = np.random.default_rng(SEED)
    options = {"ignore_eos": True, **SAMPLINGS[sampling]}
    if sampling == GRAMMAR:  # which has no end within the output
        options |= {"ignore_eos": False, "output_grammar": json_grammar(model.spec.vocab_size)}
    lengths, number = prompt_lengths(model, count), 0
    while True:
        for length in random.permutation(lengths).tolist():
            tokens = OUTPUT_TOKENS if number >= count else 1 + number * OUTPUT_TOKENS // count
            params = SamplingParams(max_tokens=tokens, seed=number, **options)
            prompt = tuple(random.integers(0, model.spec.vocab_size, length).tolist())
            yield GenerateCall(request_id=str(number), prompt_token_ids=prompt, params=params)
            number += 1


def prompt_lengths(model: Model, count: int) -> Sequence[int]:
    """Return as many lengths of prompts as there are clients, evenly spaced."""
    step = (_longest(model) - SHORTEST) / max(1, count - 1)
    return [SHORTEST + round(index * step) for index in range(count)]


def _longest(model: Model) -> int:
    return min(LONGEST, model_config(model.spec, model.options).max_seq_len - OUTPUT_TOKENS)
