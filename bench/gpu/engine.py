"""The engine in process, without a server: greedy tokens, and the time of its steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.gpu.models import Model
from shortfin_apps.llm.builder.model.config import model_config
from shortfin_apps.llm.components.batching.modes.default import DefaultModeOptions
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.invocation.page_count import BALANCED_SHARE
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.components.request.sampling_params import SamplingParams

SEED = 7
MEASURED_TOKENS = 64  # of each request
ADJUSTED = "presence penalty"  # the one of SAMPLINGS whose rows are adjusted
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "whole vocabulary": {"temperature": 1.0},
    ADJUSTED: {"temperature": 1.0, "presence_penalty": 0.5},
}
UNMEASURED_TOKENS = 4  # of each request, before the measured ones
# All prompts are computed before the first decode, so that all requests decode the same number of tokens.
PROMPTS_FIRST = DefaultModeOptions(prefills_per_decode=1_000_000, token_budget=2048)


@dataclass(frozen=True, slots=True)
class Steps:
    """A steady decode: the seconds of each step, and of each the part that waited for the device."""

    tokens: int
    seconds: tuple[float, ...]
    device_s: float

    def record(self) -> dict[str, Any]:
        """Times of a step in ms: its median, and the mean outside of the calls of the device."""
        total = sum(self.seconds)
        return {
            "steps": len(self.seconds),
            "step_ms": statistics.median(self.seconds) * 1e3,
            "host_ms": (total - self.device_s) / len(self.seconds) * 1e3,
            "tokens_per_s": self.tokens / total,
        }


def prompts(vocab_size: int, count: int, length: int) -> list[tuple[int, ...]]:
    """Seeded random token ids; a shorter list is the beginning of a longer one."""
    random = np.random.default_rng(SEED)
    return [tuple(random.integers(0, vocab_size, length).tolist()) for _ in range(count)]


def generate(engine: Engine, asked: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """The greedy continuation of each prompt, all decoded together. Raises LlmError."""
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(asked))}
    _add(engine, asked, max_tokens)
    while engine.has_work:
        for delta in engine.step():
            if delta.error is not None:
                raise delta.error
            tokens[delta.request_id] += delta.token_ids
    return list(tokens.values())


def steady_steps(engine: Engine, model: Model, requests: int, sampling: str) -> Steps:
    """Decodes of so many requests at once, around the model's context. Raises LlmError.

    The engine is one with `PROMPTS_FIRST`; `sampling` is one of SAMPLINGS.
    """
    measured, context = min(MEASURED_TOKENS, model.context // 4), model.context
    length = context - measured // 2 - UNMEASURED_TOKENS
    max_tokens = measured + UNMEASURED_TOKENS
    _add(engine, prompts(model.spec.vocab_size, requests, length), max_tokens, sampling)
    counts = dict.fromkeys(map(str, range(requests)), 0)
    while min(counts.values()) < UNMEASURED_TOKENS:
        _count(engine, counts)
    before, seconds, tokens = engine.stats().device_s, [], 0
    while max(counts.values()) < max_tokens:
        begin = time.perf_counter()
        tokens += _count(engine, counts)
        seconds.append(time.perf_counter() - begin)
    device_s = engine.stats().device_s - before
    while engine.has_work:
        _count(engine, counts)
    return Steps(tokens, tuple(seconds), device_s)


def sizes(model: Model) -> Iterator[int]:
    """The numbers of requests to decode at once: a full batch of each decode entry."""
    yield from model.options.decode_batch_sizes


def pages(model: Model) -> int:
    """The pages for the most requests that `steady_steps` decodes, and one as scratch.

    A model with windows needs more, as its window pages are counted for longer requests.
    """
    longest = model.context
    if model.spec.last_window is not None:
        config = model_config(model.spec, model.options)
        longest = max(longest, config.max_seq_len // BALANCED_SHARE)
    return 1 + max(sizes(model)) * (-(-longest // model.options.block_seq_stride) + 2)


def _add(engine: Engine, asked: Sequence[Sequence[int]], max_tokens: int, sampling: str = "greedy") -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **SAMPLINGS[sampling])
    for index, prompt in enumerate(asked):
        engine.add(GenerateCall(request_id=str(index), prompt_token_ids=tuple(prompt), params=params))


def _count(engine: Engine, counts: dict[str, int]) -> int:
    """Steps once; adds the new tokens of each request to `counts`, and returns how many there are."""
    total = 0
    for delta in engine.step():
        if delta.error is not None:
            raise delta.error
        counts[delta.request_id] += len(delta.token_ids)
        total += len(delta.token_ids)
    return total
