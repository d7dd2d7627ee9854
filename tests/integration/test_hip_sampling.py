"""An emulated AMD GPU draws from whole rows the tokens that the host draws from the same logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.batching.mode import BatchSettings
from shortfin_apps.llm.components.engine.stats import EngineStats
from shortfin_apps.llm.components.request.messages import Delta, GenerateCall
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from tests.conftest import BuildTiny
from tests.hip import CHIPS, EmulatedGpus
from tests.integration.generation import open_engine

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(300)]

MODES = [BatchSettings(batch_mode="default"), BatchSettings(batch_mode="extend-attention", token_budget=80)]
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 3.0, "top_p": 0.5},
    {"temperature": 2.0, "top_k": 5, "top_p": 0.9},
    {"temperature": 5.0, "min_p": 0.01},
    {"temperature": 2.0, "top_p": 0.8, "min_p": 0.05},
]
LENGTHS = (15, 3, 40, 16, 1, 33)
ADJUSTED: list[dict[str, Any]] = [
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.3, "top_p": 0.9},
    {"repetition_penalty": 1.3, "temperature": 2.0, "min_p": 0.01},
    {"logit_bias": ((3, 5.0), (9, -4.0)), "temperature": 0.0},
    {"allowed_token_ids": frozenset(range(40, 200, 3)), "bad_words": ((43,),)},
    {"repetition_penalty": 0.8, "top_k": 5, "min_tokens": 12},
]


@pytest.fixture(params=CHIPS)
def artifact(
    request: pytest.FixtureRequest, build_tiny: BuildTiny, emulated_gpus: EmulatedGpus
) -> Iterator[Artifact]:
    sizes: dict[str, Any] = {"prefill_batch_sizes": (2,), "decode_batch_sizes": (8,)}
    with emulated_gpus.watch(request.param):
        yield build_tiny(BuildOptions(device=f"hip:{request.param}", **sizes))


def tokens_of(
    artifact: Artifact, options: EngineSettings, kinds: list[dict[str, Any]] = KINDS, **params: Any
) -> tuple[list[tuple[int, ...]], EngineStats]:
    deltas, stats = deltas_of(artifact, options, kinds, **params)
    return [tuple(token_id for each in of_row for token_id in each.token_ids) for of_row in deltas], stats


def deltas_of(
    artifact: Artifact, options: EngineSettings, kinds: list[dict[str, Any]], **params: Any
) -> tuple[list[list[Delta]], EngineStats]:
    found: dict[str, list[Delta]] = {str(row): [] for row in range(len(kinds))}
    with open_engine(artifact, options) as engine:
        for row, (kind, length) in enumerate(zip(kinds, LENGTHS, strict=True)):
            sampling = SamplingParams(max_tokens=12, seed=row, **kind, **params)
            prompt = tuple((7 * row + 3 * i) % 200 for i in range(length))
            engine.add(GenerateCall(request_id=str(row), prompt_token_ids=prompt, params=sampling))
        while engine.has_work:
            for delta in engine.step():
                assert delta.error is None, delta.error
                found[delta.request_id].append(delta)
        return list(found.values()), engine.stats()


@pytest.mark.parametrize("mode", MODES, ids=["default", "extend"])
def test_loops_entries_and_the_host_draw_the_same_tokens(artifact: Artifact, mode: BatchSettings) -> None:
    options = EngineSettings(device="hip", batching=mode, pipeline_depth=1)
    without = replace(options, pipeline_depth=0)
    on_host, stats = tokens_of(artifact, without, logprobs=0)  # which brings all logits to the host
    assert "sample_bs8" not in stats.entries
    in_loops, stats = tokens_of(artifact, options)
    assert in_loops == on_host
    assert stats.steps_ahead > 0
    behind_entries, stats = tokens_of(artifact, without)
    assert behind_entries == on_host
    assert stats.entries["sample_bs8"].invocations >= 12


@pytest.mark.parametrize("mode", MODES, ids=["default", "extend"])
def test_rows_adjusted_on_the_device_have_the_tokens_of_the_host(
    artifact: Artifact, mode: BatchSettings
) -> None:
    options = EngineSettings(device="hip", batching=mode)
    without = replace(options, pipeline_depth=0)
    on_host, stats = tokens_of(artifact, without, ADJUSTED, logprobs=0)  # which brings all logits to the host
    assert "adjusted_sample_bs8" not in stats.entries
    on_device, stats = tokens_of(artifact, options, ADJUSTED)
    assert on_device == on_host
    assert stats.entries["adjusted_sample_bs8"].invocations >= 12


@pytest.mark.parametrize("mode", MODES, ids=["default", "extend"])
@pytest.mark.parametrize("kinds", [KINDS, ADJUSTED], ids=["plain", "adjusted"])
def test_log_probabilities_of_the_device_are_those_of_the_host(
    artifact: Artifact, mode: BatchSettings, kinds: list[dict[str, Any]]
) -> None:
    """To the bit, with the logits that receipts are made of."""
    options = EngineSettings(device="hip", batching=mode, pipeline_depth=1)
    asked: dict[str, Any] = {"logprobs": 3, "chosen_logits": True}
    on_host, stats = deltas_of(artifact, replace(options, pipeline_depth=0), kinds, **asked)
    assert "logprobs_bs8" not in stats.entries
    on_device, stats = deltas_of(artifact, options, kinds, **asked)
    for expected, found in zip(on_host, on_device, strict=True):
        assert [each.token_ids for each in found] == [each.token_ids for each in expected]
        assert [each.logprobs for each in found] == [each.logprobs for each in expected]
        assert [each.logits for each in found] == [each.logits for each in expected]
    assert stats.entries["logprobs_bs8"].invocations >= 12
    assert kinds is ADJUSTED or stats.steps_ahead > 0
