"""Times the engine alone, in this process: CPU time of its thread per step, steady or mixed."""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path
from typing import Any

from bench.gpu.engine import WIDE_PREFILLS, compute_prompts_first
from bench.gpu.json_grammar import json_grammar
from bench.host.device import EXTEND_TOKENS, IdleDevice, model_config
from shortfin_apps.llm.components.batching.mode import BatchSettings
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from shortfin_apps.llm.serving.loading import make_engine

PROMPT_TOKENS, OUTPUT_TOKENS, UNMEASURED_STEPS = 128, 512, 8
VOCAB_SIZE = 49_152
PLAIN, SCHEMA = "plain", "JSON schema"
SAMPLINGS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "penalty": {"presence_penalty": 0.5},
    "logprobs": {"logprobs": 5},
    SCHEMA: {"temperature": 1.0},
}
MIXED = BatchSettings(batch_mode="extend-attention", token_budget=EXTEND_TOKENS)
MIXED_PROMPT_TOKENS, MIXED_OUTPUT_TOKENS = (16, 512), 64
UNMEASURED_MIXED_STEPS, MIXED_STEPS = 64, 512
_SEED = 7


def idle_engine(rows: int, vocab_size: int, *, step_s: float = 0.0) -> Engine:
    """Create an engine that computes all prompts first. Invocations take `step_s` and no CPU time."""
    engine = _engine(IdleDevice(rows, vocab_size, step_s), rows, WIDE_PREFILLS)
    compute_prompts_first(engine)
    return engine


def steady_step_us(rows: int, sampling: str = PLAIN) -> float:
    """Return the median CPU time in us of a step that generates one token for each of `rows` requests.

    `sampling` is a key of SAMPLINGS. Counts the CPU time of all threads, which those of masks are among.
    """
    device = IdleDevice(rows, VOCAB_SIZE)
    engine = _engine(device, rows, WIDE_PREFILLS)
    compute_prompts_first(engine)
    for request in _steady_calls(rows, sampling):
        engine.add(request)
    steps: list[float] = []
    while engine.has_work:
        began_s = time.process_time() - device.drawing_s
        deltas = engine.step()
        taken_s = time.process_time() - device.drawing_s - began_s
        engine.stats()  # called by the server's thread after each step
        if len(deltas) >= rows:
            steps.append(taken_s)
    return statistics.median(steps[UNMEASURED_STEPS:]) * 1e6


def _steady_calls(rows: int, sampling: str) -> list[GenerateCall]:
    options: dict[str, Any] = {"temperature": 0, "ignore_eos": True, **SAMPLINGS[sampling]}
    if sampling == SCHEMA:  # which has no end within the output
        options |= {"ignore_eos": False, "output_grammar": json_grammar(VOCAB_SIZE)}
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, **options)
    prompts = [tuple((row + i) % VOCAB_SIZE for i in range(PROMPT_TOKENS)) for row in range(rows)]
    return [
        GenerateCall(request_id=str(row), prompt_token_ids=prompt, params=params)
        for row, prompt in enumerate(prompts)
    ]


def mixed_step_us(rows: int) -> float:
    """Return the mean CPU time in us of a step with `rows` requests, each replaced as soon as it has ended.

    Requests have prompts of 16 to 512 tokens and generate 64; the first ones fewer, so that they end at
    different times. A step of 128 requests computes two prompts on average, with the others' decodes.
    """
    engine, source = _engine(IdleDevice(rows, VOCAB_SIZE), rows, MIXED), random.Random(_SEED)
    for row in range(rows):
        engine.add(_mixed_call(source, str(row), source.randint(1, MIXED_OUTPUT_TOKENS)))
    num_added, total_s = rows, 0.0
    for step in range(UNMEASURED_MIXED_STEPS + MIXED_STEPS):
        began_s = time.thread_time()
        deltas = engine.step()
        if step >= UNMEASURED_MIXED_STEPS:
            total_s += time.thread_time() - began_s
        engine.stats()
        for _ in [delta for delta in deltas if delta.finish_reason is not None]:
            engine.add(_mixed_call(source, str(num_added), MIXED_OUTPUT_TOKENS))
            num_added += 1
    return total_s / MIXED_STEPS * 1e6


def _engine(device: IdleDevice, rows: int, batching: BatchSettings) -> Engine:
    options = EngineSettings(batching=batching, max_running=rows)
    return make_engine(device, model_config(rows), Path(), (), frozenset(), options)


def _mixed_call(source: random.Random, request_id: str, max_tokens: int) -> GenerateCall:
    prompt = tuple(source.choices(range(VOCAB_SIZE), k=source.randint(*MIXED_PROMPT_TOKENS)))
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return GenerateCall(request_id=request_id, prompt_token_ids=prompt, params=params)
