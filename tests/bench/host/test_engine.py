from __future__ import annotations

from bench.host.engine import SAMPLINGS, idle_engine, mixed_step_us, steady_step_us
from shortfin_apps.llm.components.request.messages import FinishReason, GenerateCall
from shortfin_apps.llm.components.request.sampling_params import SamplingParams


def test_an_engine_over_the_idle_device_completes_its_requests() -> None:
    engine = idle_engine(4, vocab_size=512)
    for row in range(4):
        params = SamplingParams(max_tokens=40, temperature=0)
        engine.add(GenerateCall(request_id=str(row), prompt_token_ids=(1, 2, 3), params=params))
    tokens = dict.fromkeys("0123", 0)
    while engine.has_work:
        for delta in engine.step():
            assert all(0 < token_id < 512 for token_id in delta.token_ids)
            assert delta.finish_reason in (None, FinishReason.LENGTH)
            tokens[delta.request_id] += len(delta.token_ids)
    assert tokens == dict.fromkeys("0123", 40)
    assert engine.stats().steps_ahead > 0


def test_steps_are_measured() -> None:
    assert all(steady_step_us(2, sampling) > 0 for sampling in SAMPLINGS)
    assert mixed_step_us(2) > 0
