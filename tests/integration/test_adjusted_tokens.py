"""Penalties, bans and prompts' log-probabilities on a compiled model, against a numpy forward pass in f32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from shortfin_apps.llm.builder.sources.random_tiny import RandomTinySource
from shortfin_apps.llm.builder.weights.write import plan_weights
from shortfin_apps.llm.components.batching import BATCH_MODES
from shortfin_apps.llm.components.batching.mode import BatchModeName, BatchSettings
from shortfin_apps.llm.components.request.messages import GenerateCall, TokenLogprobs
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.model.reference.forward import forward
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from tests.components.sampling.reference import F32, adjusted
from tests.conftest import BuildTiny
from tests.integration.generation import open_engine
from tests.integration.test_beams import OPTIONS

pytestmark = pytest.mark.slow

MAX_TOKENS = 10
TOLERANCE = 1e-3
KINDS: tuple[dict[str, Any], ...] = (
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.4, "logit_bias": ((40, 3.0),)},
    {"allowed_token_ids": frozenset(range(40, 90)), "bad_words": ((41,), (50, 51)), "presence_penalty": 2.0},
)


def reference(context: Sequence[int]) -> Any:
    source = RandomTinySource()
    weights = {w.name: w.load(source).astype(np.float32) for w in plan_weights(source.spec)}
    return forward(source.spec, weights, np.array(context)).astype(F32)


@pytest.mark.parametrize("mode", BATCH_MODES)
@pytest.mark.parametrize("num_pages", [None, 9])
def test_tokens_and_scores_are_those_of_the_reference(
    build_tiny: BuildTiny, mode: BatchModeName, num_pages: int | None
) -> None:
    """All requests run at once, with few pages also with preemptions."""
    random = np.random.default_rng(3)
    prompts = [random.integers(32, 127, 28 + 2 * i).tolist() for i in range(len(KINDS))]
    calls = [
        GenerateCall(
            request_id=str(i),
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(max_tokens=MAX_TOKENS, temperature=0, **kind),
        )
        for i, (prompt, kind) in enumerate(zip(prompts, KINDS, strict=True))
    ]
    forced = tuple(prompts[0][1:])
    scoring = SamplingParams(max_tokens=len(forced), temperature=0, logprobs=0, forced_token_ids=forced)
    calls.append(GenerateCall(request_id="scored", prompt_token_ids=(prompts[0][0],), params=scoring))
    options = EngineSettings(batching=BatchSettings(batch_mode=mode), pages=num_pages)
    with open_engine(build_tiny(OPTIONS), options) as engine:
        for call in calls:
            engine.check(call)
            engine.add(call)
        outputs: dict[str, list[int]] = {call.request_id: [] for call in calls}
        scores: list[TokenLogprobs] = []
        while engine.has_work:
            for delta in engine.step():
                assert delta.error is None, delta.error
                outputs[delta.request_id] += delta.token_ids
                scores += delta.logprobs
        assert (engine.stats().preemptions > 0) is (num_pages is not None)
    for call, prompt in zip(calls, prompts, strict=False):
        check_tokens(outputs[call.request_id], call.params, prompt)
    logits = reference(prompts[0])[:-1].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    got = [score.logprob for score in scores]
    np.testing.assert_allclose(got, expected[np.arange(len(forced)), forced], atol=TOLERANCE)


def check_tokens(output: Sequence[int], params: SamplingParams, prompt: Sequence[int]) -> None:
    """Each is the best one after the tokens before it, or within TOLERANCE of it."""
    rows = reference([*prompt, *output])[len(prompt) - 1 :]
    assert len(output) == MAX_TOKENS
    for index, token_id in enumerate(output):
        row = adjusted(rows[index], params, prompt, output[:index])
        assert row[token_id] >= row.max() - TOLERANCE
