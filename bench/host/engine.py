"""Times the engine alone, in this process: CPU time of its thread per step of a steady decode."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from bench.gpu.engine import WIDE_PREFILLS, compute_prompts_first
from bench.host.device import IdleDevice, model_config
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from shortfin_apps.llm.serving.loading import make_engine

PROMPT_TOKENS, OUTPUT_TOKENS, UNMEASURED_STEPS = 128, 512, 8
VOCAB_SIZE = 4096


def idle_engine(rows: int, vocab_size: int, *, step_s: float = 0.0) -> Engine:
    """Create an engine for up to `rows` requests. Invocations take `step_s` and no CPU time."""
    options = EngineSettings(batching=WIDE_PREFILLS, max_running=rows)
    device = IdleDevice(rows, vocab_size, step_s)
    engine = make_engine(device, model_config(rows), Path(), (), frozenset(), options)
    compute_prompts_first(engine)
    return engine


def steady_step_us(rows: int) -> float:
    """Return the median CPU time in us of a step that generates one token for each of `rows` requests."""
    engine = idle_engine(rows, VOCAB_SIZE)
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True)
    for row in range(rows):
        prompt = tuple((row + position) % VOCAB_SIZE for position in range(PROMPT_TOKENS))
        engine.add(GenerateCall(request_id=str(row), prompt_token_ids=prompt, params=params))
    steps: list[float] = []
    while engine.has_work:
        began_s = time.thread_time()
        deltas = engine.step()
        taken_s = time.thread_time() - began_s
        engine.stats()  # called by the server's thread after each step
        if len(deltas) == rows:
            steps.append(taken_s)
    return statistics.median(steps[UNMEASURED_STEPS:]) * 1e6
