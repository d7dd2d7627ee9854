"""Pipelined steps on real programs: the same answers as one step at a time, on runtimes and emulated GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.batching.mode import BatchSettings
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.request.messages import Delta, FinishReason, GenerateCall, TokenLogprobs
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.runtime.open import Runtime
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from tests.conftest import BuildTiny
from tests.hip import CHIPS, EmulatedGpus
from tests.integration.generation import open_engine
from tests.runtimes import RUNTIMES, needs_shortfin

pytestmark = pytest.mark.slow

LENGTHS = (1, 15, 16, 40, 70, 90)
ARRIVALS = (0, 0, 0, 3, 9, 12)
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 3, "logprobs": 3},
    {"temperature": 1.3, "top_k": 64, "min_p": 0.05, "seed": 2**62},
    {"temperature": 1.1, "seed": 7, "logprobs": 0, "chosen_logits": True},
)
MODES = [BatchSettings(batch_mode="default"), BatchSettings(batch_mode="extend-attention", token_budget=80)]


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    logits: list[float]
    reason: FinishReason | None


def calls(
    max_tokens: int, stop_token_ids: frozenset[int] = frozenset(), lengths: Sequence[int] = LENGTHS
) -> list[GenerateCall]:
    random = np.random.default_rng(5)
    return [
        GenerateCall(
            request_id=str(index),
            prompt_token_ids=tuple(random.integers(0, 256, length).tolist()),
            params=SamplingParams(
                max_tokens=max_tokens, stop_token_ids=stop_token_ids, **KINDS[index % len(KINDS)]
            ),
        )
        for index, length in enumerate(lengths)
    ]


def answers(engine: Engine, asked: Sequence[GenerateCall]) -> list[Answer]:
    """Each request arrives before its step of ARRIVALS."""
    deltas: dict[str, list[Delta]] = {each.request_id: [] for each in asked}
    for step in count():
        for each, at in zip(asked, ARRIVALS, strict=True):
            if at == step:
                engine.add(each)
        if step > max(ARRIVALS) and not engine.has_work:
            return list(map(joined, deltas.values()))
        for delta in engine.step():
            assert delta.error is None, delta.error
            deltas[delta.request_id].append(delta)
    raise AssertionError


def joined(deltas: Sequence[Delta]) -> Answer:
    return Answer(
        [token_id for delta in deltas for token_id in delta.token_ids],
        [each for delta in deltas for each in delta.logprobs],
        [each.logit for delta in deltas for each in delta.logits],
        deltas[-1].finish_reason,
    )


def compare(artifact: Artifact, asked: Sequence[GenerateCall], **options: Any) -> None:
    with open_engine(artifact, EngineSettings(pipeline_depth=0, **options)) as engine:
        expected = answers(engine, asked)
        assert engine.stats().steps_ahead == 0
    for depth in (1, 2):
        with open_engine(artifact, EngineSettings(pipeline_depth=depth, **options)) as engine:
            assert answers(engine, asked) == expected
            assert engine.stats().steps_ahead > 0


@pytest.fixture(scope="module")
def artifact(build_tiny: BuildTiny) -> Artifact:
    return build_tiny(
        BuildOptions(prefill_batch_sizes=(1, 4), decode_batch_sizes=(1, 4, 8), decode_loop_sizes=(1, 4, 8))
    )


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("mode", MODES, ids=["default", "extend"])
def test_answers_are_those_without(artifact: Artifact, runtime: Runtime, mode: BatchSettings) -> None:
    compare(artifact, calls(30), runtime=runtime, batching=mode)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_draw_waits_for_the_prefill_that_computes_its_logits(artifact: Artifact, runtime: Runtime) -> None:
    """IREE 3.13 gives a result on a CPU no memory before its invocation runs."""
    compare(artifact, calls(8, lengths=[200] * len(LENGTHS)), runtime=runtime)


@pytest.mark.parametrize("mode", MODES, ids=["default", "extend"])
def test_answers_are_those_without_when_requests_stop_and_are_preempted(
    artifact: Artifact, mode: BatchSettings
) -> None:
    growing = [15] * len(LENGTHS)  # prompts that fill a page, and three more while they decode
    options: dict[str, Any] = {"runtime": "iree", "batching": mode, "pages": 9}
    with open_engine(artifact, EngineSettings(**options)) as engine:
        undisturbed = answers(engine, calls(40, lengths=growing))
        assert engine.stats().preemptions > 0
    stops = frozenset(each.tokens[30] for each in undisturbed)
    compare(artifact, calls(40, lengths=growing), **options)
    compare(artifact, calls(40, stops, lengths=growing), **options)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_steady_decode_uploads_block_tables_alone(artifact: Artifact, runtime: Runtime) -> None:
    with open_engine(artifact, EngineSettings(runtime=runtime)) as engine:
        params = SamplingParams(max_tokens=60, temperature=0.0)
        for name in "abcd":
            engine.add(GenerateCall(request_id=name, prompt_token_ids=(1, 2, ord(name)), params=params))
        while engine.stats().steps_ahead == 0:
            engine.step()
        before = engine.stats()
        for _ in range(40):
            engine.step()
        after = engine.stats()
        assert after.steps_ahead == before.steps_ahead + 40
        assert after.uploads - before.uploads == after.block_tables.uploads - before.block_tables.uploads
        assert after.block_tables.uploads - before.block_tables.uploads <= 3, "pages hold 16 tokens"


@needs_shortfin
@pytest.mark.emulated
@pytest.mark.timeout(300)
@pytest.mark.parametrize("chip", CHIPS)
def test_answers_are_those_without_on_a_gpu(
    chip: str, build_tiny: BuildTiny, emulated_gpus: EmulatedGpus
) -> None:
    with emulated_gpus.watch(chip):
        options = BuildOptions(
            device=f"hip:{chip}",
            prefill_batch_sizes=(2,),
            decode_batch_sizes=(8,),
            decode_loop_sizes=(8,),
        )
        compare(build_tiny(options), calls(10), device="hip", batching=BatchSettings(batch_mode="default"))
