"""Artefacts of other families than Llama, from a directory to tokens, in both batching modes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.builder.builder import build
from shortfin_apps.llm.builder.progress import QuietProgress
from shortfin_apps.llm.builder.sources.hf_directory import HfDirectorySource
from shortfin_apps.llm.components.batching.mode import BatchModeName, BatchSettings
from shortfin_apps.llm.model.reference.forward import forward
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from tests.builder.golden_families import F32, GoldenFamily, stored_weights
from tests.builder.model_files import TINY
from tests.integration.generation import Continuation, assert_same, generate, open_engine

pytestmark = pytest.mark.slow

OPTIONS = BuildOptions(
    weights="f32", kv="f32", prefill_batch_sizes=(1, 2), decode_batch_sizes=(1, 4), chunk_sizes=(), top_k=8
)
LENGTHS = (1, 16, 17, 40, 100)
MAX_TOKENS = 12
TOLERANCE = 1e-3  # sums of f32 in another order
PAGES = 14  # less than all take in the end, so that some are preempted or wait


@pytest.fixture(
    scope="module",
    params=[
        *("qwen3-bias", "qwen3-moe", "smollm3-listed", "olmo2", "gemma3", "gemma2"),
        *("ministral3", "gemma4-e", "gemma4-moe", "deepseek3"),
    ],
)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = GoldenFamily.of(request.param).write_hf(tmp_path_factory.mktemp("source"))
    made.joinpath("tokenizer.json").write_text(TINY.tokenizer_files().tokenizer, encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def artifact(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return build(str(directory), tmp_path_factory.mktemp("artefact") / "out", OPTIONS, QuietProgress())


def greedy(spec: ModelSpec, weights: dict[str, F32], prompt: list[int]) -> Continuation:
    tokens, gaps = list(prompt), []
    for _ in range(MAX_TOKENS):
        logits = forward(spec, weights, np.array(tokens))[-1]
        second, best = np.sort(logits)[-2:]
        tokens.append(int(logits.argmax()))
        gaps.append(float(best - second))
    return Continuation(tuple(tokens[len(prompt) :]), tuple(gaps))


@pytest.mark.parametrize("mode", ["default", "extend-attention"])
@pytest.mark.parametrize("chunk_tokens", [16, 64])
def test_tokens_are_those_of_the_reference(
    directory: Path, artifact: Artifact, mode: BatchModeName, chunk_tokens: int
) -> None:
    """Cold, and again with what the prefix cache has kept."""
    source = HfDirectorySource(directory)
    rng, weights = np.random.default_rng(5), stored_weights(source)
    prompts = [rng.integers(0, source.spec.vocab_size, length).tolist() for length in LENGTHS]
    expected = [greedy(source.spec, weights, prompt) for prompt in prompts]
    options = EngineSettings(
        runtime="iree",
        prefix_cache="trie",
        pages=PAGES,
        batching=BatchSettings(batch_mode=mode, chunk_tokens=chunk_tokens),
    )
    with open_engine(artifact, options) as engine:
        got = [*generate(engine, prompts, MAX_TOKENS), *generate(engine, prompts, MAX_TOKENS)]
    compared = [assert_same(e, g.token_ids, TOLERANCE) for e, g in zip(expected * 2, got, strict=True)]
    assert sum(compared) > len(got) * MAX_TOKENS / 2
