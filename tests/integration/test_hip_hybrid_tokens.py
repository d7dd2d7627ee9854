"""A model with states beside attention gives the tokens on AMD GPUs that it gives on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.builder.builder import build
from shortfin_apps.llm.builder.progress import QuietProgress
from shortfin_apps.llm.components.batching.mode import BatchSettings
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from tests.hip import EmulatedGpus
from tests.integration.byte_models import write_byte_model
from tests.integration.generation import Continuation, assert_all_same, generate, open_engine
from tests.integration.test_hybrid_speculation import speculating

pytest.importorskip("triton", reason="Triton is not installed")

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(600)]

CHIP = "gfx942"  # another's kernels are tested one by one
TOLERANCE = 0.1  # both are rounded to bf16, at other places
MAX_TOKENS = 5
LENGTHS = (1, 16, 17, 40)
OPTIONS = BuildOptions(
    context_length=128, prefill_batch_sizes=(2,), decode_batch_sizes=(4,), extend_sizes=(64,), top_k=8
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model("qwen35", tmp_path_factory.mktemp("hybrid") / "source")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = np.random.default_rng(11)
    return [random.integers(0, 256, n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def on_cpu(
    source: Path, prompts: Sequence[Sequence[int]], tmp_path_factory: pytest.TempPathFactory
) -> list[Continuation]:
    """The tokens of each prompt when it runs alone on the CPU."""
    artifact = build(str(source), tmp_path_factory.mktemp("cpu") / "artefact", OPTIONS, QuietProgress())
    with open_engine(artifact, EngineSettings(runtime="iree", prefix_cache="none")) as engine:
        return [generate(engine, [prompt], MAX_TOKENS)[0] for prompt in prompts]


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    options = replace(OPTIONS, device=f"hip:{CHIP}")
    return build(str(source), tmp_path_factory.mktemp("hip") / "artefact", options, QuietProgress())


@pytest.fixture
def artifact(built: Artifact, emulated_gpus: EmulatedGpus) -> Iterator[Artifact]:
    with emulated_gpus.watch(CHIP):
        yield built


@pytest.mark.parametrize(
    "mode",
    [
        BatchSettings(batch_mode="default", chunk_tokens=32),
        BatchSettings(batch_mode="extend-attention", token_budget=48),
    ],
    ids=["chunks", "extend"],
)
def test_tokens_are_those_of_the_cpu(
    artifact: Artifact,
    prompts: Sequence[Sequence[int]],
    on_cpu: Sequence[Continuation],
    mode: BatchSettings,
) -> None:
    """Once from the start, and once behind the pages that are cached then."""
    with open_engine(artifact, EngineSettings(device="hip", batching=mode)) as engine:
        cold = generate(engine, prompts, MAX_TOKENS)
        warm = generate(engine, prompts, MAX_TOKENS)
        assert engine.stats().cached_tokens == sum((n - 1) // 16 * 16 for n in LENGTHS)
    assert_all_same(on_cpu, cold, TOLERANCE, MAX_TOKENS)
    assert_all_same(on_cpu, warm, TOLERANCE, MAX_TOKENS)


def test_proposed_tokens_change_no_bit(artifact: Artifact, prompts: Sequence[Sequence[int]]) -> None:
    options: dict[str, Any] = {"device": "hip", "batching": BatchSettings(batch_mode="extend-attention")}
    count = 2 * MAX_TOKENS
    with open_engine(artifact, EngineSettings(**options)) as engine:
        expected = generate(engine, prompts, count)
    texts = [[*prompt, *each.token_ids] for prompt, each in zip(prompts, expected, strict=True)]
    with speculating(artifact, texts, **options) as engine:
        assert generate(engine, prompts, count) == expected
