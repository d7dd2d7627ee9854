"""Speculation on real programs: the same answers as without, to the bit, beside other requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.batching.mode import BatchSettings
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.invocation.page_table import make_runner
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.runtime.device import Device
from shortfin_apps.llm.components.runtime.open import Runtime, open_device
from shortfin_apps.llm.contract.abi import EntryFamily
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from shortfin_apps.llm.serving.loading import NO_FACTS, ModelFacts
from shortfin_apps.llm.serving.speculative_loading import DraftFiles
from tests.conftest import DRAFT_OPTIONS, TINY_OPTIONS, BuildTiny
from tests.hip import EmulatedGpus
from tests.integration.generation import open_engine
from tests.runtimes import RUNTIMES, needs_shortfin

pytestmark = pytest.mark.slow

CHIP = "gfx1100"  # another takes minutes more
MODES = [BatchSettings(batch_mode="default"), BatchSettings(batch_mode="extend-attention", token_budget=80)]
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.3, "seed": 3},
    {"temperature": 0.0, "frequency_penalty": 0.3},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.4, "top_k": 5, "seed": 2**62},
)
ARRIVALS = (0, 0, 2, 5, 9)
PROMPT_PERIOD = 9  # tokens, after which prompts repeat themselves

Answer = tuple[tuple[int, ...], tuple[object, ...]]


def calls(max_tokens: int) -> list[GenerateCall]:
    random = np.random.default_rng(2)
    asked = []
    for index, params in enumerate(KINDS):
        period = random.integers(0, 256, PROMPT_PERIOD).tolist()
        prompt = tuple((period * 6)[: 30 + 5 * index])
        asked.append(
            GenerateCall(
                request_id=str(index),
                prompt_token_ids=prompt,
                params=SamplingParams(max_tokens=max_tokens, **params),
            )
        )
    return asked


def answers(engine: Engine, asked: list[GenerateCall]) -> list[Answer]:
    """Tokens and log-probabilities; each request arrives before its step of ARRIVALS."""
    got: dict[str, Answer] = {each.request_id: ((), ()) for each in asked}
    step = 0
    while step <= max(ARRIVALS) or engine.has_work:
        for each, at in zip(asked, ARRIVALS, strict=True):
            if at == step:
                engine.add(each)
        for delta in engine.step():
            assert delta.error is None, delta.error
            tokens, logprobs = got[delta.request_id]
            got[delta.request_id] = (tokens + delta.token_ids, logprobs + delta.logprobs)
        step += 1
    return list(got.values())


def compare(artifact: Artifact, max_tokens: int, draft: Artifact | None = None, **options: Any) -> None:
    """With prompt lookup, and with a draft model where one is given."""
    asked = calls(max_tokens)
    proposing: dict[str, Any] = {"speculative": "ngram"}
    facts = NO_FACTS
    if draft is not None:
        paths: dict[str, Any] = {"vmfb": draft.vmfb, "parameters": draft.parameters}
        proposing = {}
        facts = ModelFacts(draft_model=DraftFiles(config=draft.config, round_cost=0, **paths))
    with open_engine(artifact, EngineSettings(**options)) as engine:
        expected = answers(engine, asked)
        steps = engine.stats().steps
    with open_engine(artifact, EngineSettings(**proposing, **options), facts) as engine:
        assert answers(engine, asked) == expected
        stats = engine.stats()
    assert stats.speculation is not None
    assert 0 < stats.speculation.accepted < stats.speculation.proposed, "nothing was right, or nothing wrong"
    assert stats.steps < steps


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("mode", MODES, ids=["default", "extend"])
def test_answers_are_those_without(tiny_artifact: Artifact, runtime: Runtime, mode: BatchSettings) -> None:
    compare(tiny_artifact, 60, runtime=runtime, batching=mode)


@pytest.mark.parametrize("mode", MODES, ids=["default", "extend"])
def test_answers_are_those_without_where_requests_are_preempted(
    tiny_artifact: Artifact, mode: BatchSettings
) -> None:
    compare(tiny_artifact, 60, runtime="iree", batching=mode, pages=16)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("mode", MODES, ids=["default", "extend"])
def test_answers_are_those_without_a_draft_model(
    tiny_artifact: Artifact, build_tiny: BuildTiny, runtime: Runtime, mode: BatchSettings
) -> None:
    """One of coarser weights and other pages, which is right more often than not."""
    draft = build_tiny(replace(DRAFT_OPTIONS, weights="q4", block_seq_stride=32))
    compare(tiny_artifact, 60, draft, runtime=runtime, batching=mode)


def test_answers_are_those_without_a_draft_model_where_requests_are_preempted(
    tiny_artifact: Artifact, build_tiny: BuildTiny
) -> None:
    draft = build_tiny(replace(DRAFT_OPTIONS, weights="q4", block_seq_stride=32))
    compare(
        tiny_artifact,
        60,
        draft,
        runtime="iree",
        batching=BatchSettings(batch_mode="extend-attention", token_budget=80),
        pages=16,
    )


@needs_shortfin
@pytest.mark.emulated
@pytest.mark.timeout(300)
def test_answers_are_those_without_a_draft_model_on_a_gpu(
    build_tiny: BuildTiny, emulated_gpus: EmulatedGpus
) -> None:
    with emulated_gpus.watch(CHIP):
        options = BuildOptions(
            device=f"hip:{CHIP}", prefill_batch_sizes=(1,), decode_batch_sizes=(1, 4), extend_sizes=(16,)
        )
        draft = build_tiny(replace(options, weights="q8_0", block_seq_stride=32))
        compare(build_tiny(options), 12, draft, device="hip")


@pytest.mark.parametrize("drafts", [False, True])
def test_answers_are_those_without_beside_decode_loops(build_tiny: BuildTiny, drafts: bool) -> None:
    sizes = (1, 4, 8)
    options = replace(TINY_OPTIONS, decode_batch_sizes=sizes, decode_loop_sizes=sizes)
    draft = build_tiny(replace(options, weights="q4", block_seq_stride=32)) if drafts else None
    compare(build_tiny(options), 60, draft, runtime="iree", pipeline_depth=1)


@needs_shortfin
@pytest.mark.emulated
@pytest.mark.timeout(300)
def test_rows_of_one_request_are_decodes_on_a_gpu(build_tiny: BuildTiny, emulated_gpus: EmulatedGpus) -> None:
    with emulated_gpus.watch(CHIP):
        options = BuildOptions(
            device=f"hip:{CHIP}", prefill_batch_sizes=(1,), decode_batch_sizes=(1,), extend_sizes=(16,)
        )
        assert_rows_are_decodes(build_tiny(options), open_device("hip"))


@pytest.mark.parametrize("options", [{}, {"kv": "q8_0"}, {"weights": "f32"}, {"weights": "q8_0"}], ids=str)
def test_rows_of_one_request_are_decodes(build_tiny: BuildTiny, options: dict[str, Any]) -> None:
    assert_rows_are_decodes(build_tiny(replace(TINY_OPTIONS, **options)), open_device())


def assert_rows_are_decodes(artifact: Artifact, device: Device) -> None:
    """Tokens of one request in an `extend`, a row each, have the logits of one decode after another."""
    prompt_length, count = 13, 6  # across the end of a page
    try:
        program = device.load_program(artifact.vmfb, artifact.parameters, artifact.config.module_name)
        runner = make_runner(device, program, artifact.config, 12)
        random = np.random.default_rng(4)
        tokens = random.integers(0, 256, prompt_length + count).tolist()
        params = SamplingParams(max_tokens=1)
        request = Request(
            GenerateCall(request_id="a", prompt_token_ids=tuple(tokens[:prompt_length]), params=params)
        )

        def task(start: int, stop: int, pages: list[int]) -> LlmTaskInput:
            return LlmTaskInput(request, tokens[start:stop], start, stop, pages)

        def logits(family: EntryFamily, tasks: list[LlmTaskInput]) -> list[bytes]:
            result = runner.run(Batch(family, tuple(tasks)))
            rows = [result.row(row, with_logits=True).logits for row in range(len(tasks))]
            return [row.tobytes() for row in rows if row is not None]

        apart, together = [3, 1, 7], [2, 6, 4]
        for pages in (apart, together):
            logits(EntryFamily.PREFILL, [task(0, prompt_length, pages)])
        positions = range(prompt_length, prompt_length + count)
        one_by_one = [logits(EntryFamily.DECODE, [task(at, at + 1, apart)])[0] for at in positions]
        assert len(set(one_by_one)) == count
        assert logits(EntryFamily.EXTEND, [task(at, at + 1, together) for at in positions]) == one_by_one
    finally:
        device.close()
