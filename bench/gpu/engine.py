"""The engine in process, without a server: greedy tokens, and step times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.gpu.models import Model
from shortfin_apps.llm.components.batching.mode import BatchSettings
from shortfin_apps.llm.components.batching.modes.default import DefaultMode
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.invocation.page_count import BALANCED_SHARE
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.model.config import model_config, window_of

SEED = 7
MEASURED_TOKENS = 64  # per request
ADJUSTED = "presence penalty"  # the entry of SAMPLINGS that adjusts rows
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "whole vocabulary": {"temperature": 1.0},
    ADJUSTED: {"temperature": 1.0, "presence_penalty": 0.5},
}
UNMEASURED_TOKENS = 4  # per request, before the measured ones
WIDE_PREFILLS = BatchSettings(batch_mode="default", token_budget=2048)


@dataclass(frozen=True, slots=True)
class Steps:
    """A steady decode: the seconds of each step, and the total time spent waiting for the device."""

    tokens: int
    seconds: tuple[float, ...]
    device_s: float

    def record(self) -> dict[str, Any]:
        """Return step times in ms: the median, and the mean outside of device calls."""
        total = sum(self.seconds)
        return {
            "steps": len(self.seconds),
            "step_ms": statistics.median(self.seconds) * 1e3,
            "host_ms": (total - self.device_s) / len(self.seconds) * 1e3,
            "tokens_per_s": self.tokens / total,
        }


def prompts(vocab_size: int, count: int, length: int) -> list[tuple[int, ...]]:
    """Return seeded random token ids; a shorter list is a prefix of a longer one."""
    random = np.random.default_rng(SEED)
    return [tuple(random.integers(0, vocab_size, length).tolist()) for _ in range(count)]


def generate(engine: Engine, asked: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Generate the greedy continuation of each prompt, in one batch. Raises LlmError."""
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(asked))}
    _add(engine, asked, max_tokens)
    while engine.has_work:
        for delta in engine.step():
            if delta.error is not None:
                raise delta.error
            tokens[delta.request_id] += delta.token_ids
    return list(tokens.values())


def steady_steps(
    engine: Engine, model: Model, requests: int, sampling: str, tokens_each: int = MEASURED_TOKENS
) -> Steps:
    """Measure decodes of `requests` at once, around the model's context. Raises LlmError.

    The engine must be passed to `compute_prompts_first` before; `sampling` is a key of SAMPLINGS.
    `tokens_each`: per request, if the context is long enough.
    """
    measured, context = min(tokens_each, model.context // 4), model.context
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


def compute_prompts_first(engine: Engine) -> None:
    """Compute all prompts before the first decode, so that all requests have the same number of decodes."""
    mode = engine._scheduler.mode
    assert isinstance(mode, DefaultMode)
    mode.prefills_per_decode = 1_000_000


def sizes(model: Model) -> Iterator[int]:
    """Yield the batch sizes to measure: a full batch of each decode entry."""
    yield from model.options.decode_batch_sizes


def pages(model: Model) -> int:
    """Return the number of pages for the largest batch of `steady_steps`, plus the scratch page.

    A model with windows needs more, as its window pages are computed for longer requests.
    """
    longest = model.context
    if window_of(model.spec) is not None:
        config = model_config(model.spec, model.options)
        longest = max(longest, config.max_seq_len // BALANCED_SHARE)
    return 1 + max(sizes(model)) * (-(-longest // model.options.block_seq_stride) + 2)


def _add(engine: Engine, asked: Sequence[Sequence[int]], max_tokens: int, sampling: str = "greedy") -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **SAMPLINGS[sampling])
    for index, prompt in enumerate(asked):
        engine.add(GenerateCall(request_id=str(index), prompt_token_ids=tuple(prompt), params=params))


def _count(engine: Engine, counts: dict[str, int]) -> int:
    """Step once; add each request's new tokens to `counts`, and return their total."""
    total = 0
    for delta in engine.step():
        if delta.error is not None:
            raise delta.error
        counts[delta.request_id] += len(delta.token_ids)
        total += len(delta.token_ids)
    return total
