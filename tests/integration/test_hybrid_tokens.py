"""A model with states beside attention gives the same tokens: batched, chunked, cached, after preemption."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.builder.builder import build
from shortfin_apps.llm.builder.progress import QuietProgress
from shortfin_apps.llm.components.batching.mode import BatchSettings
from shortfin_apps.llm.components.kvcache import PrefixCache
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from tests.integration.byte_models import write_byte_model
from tests.integration.generation import Continuation, assert_all_same, generate, open_engine

pytestmark = pytest.mark.slow

TOLERANCE = 0.05  # bf16 weights, activations and K/V
MAX_TOKENS = 20
LENGTHS = (1, 15, 16, 17, 33, 64, 130)
OPTIONS = BuildOptions(
    context_length=256, prefill_batch_sizes=(1, 2), decode_batch_sizes=(2, 8), decode_loop_sizes=(8,), top_k=8
)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("hybrid")
    source = write_byte_model("qwen35", folder / "source")
    return build(str(source), folder / "artefact", OPTIONS, QuietProgress())


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = np.random.default_rng(11)
    return [random.integers(0, 256, n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def alone(artifact: Artifact, prompts: Sequence[Sequence[int]]) -> list[Continuation]:
    options = EngineSettings(
        runtime="iree", prefix_cache="none", batching=BatchSettings(batch_mode="default", chunk_tokens=256)
    )
    with open_engine(artifact, options) as engine:
        return [generate(engine, [prompt], MAX_TOKENS)[0] for prompt in prompts]


def check(alone: Sequence[Continuation], got: Sequence[Continuation]) -> None:
    assert_all_same(alone, got, TOLERANCE, MAX_TOKENS)


@pytest.mark.parametrize(
    ("prefix_cache", "mode", "depth"),
    [
        ("none", BatchSettings(batch_mode="default", chunk_tokens=16), 0),
        ("trie", BatchSettings(batch_mode="default", chunk_tokens=48), 1),
        ("trie", BatchSettings(batch_mode="extend-attention"), 0),
    ],
)
def test_batched_and_chunked(
    artifact: Artifact,
    prompts: Sequence[Sequence[int]],
    alone: Sequence[Continuation],
    prefix_cache: PrefixCache,
    mode: BatchSettings,
    depth: int,
) -> None:
    options = EngineSettings(runtime="iree", prefix_cache=prefix_cache, batching=mode, pipeline_depth=depth)
    with open_engine(artifact, options) as engine:
        cold = generate(engine, prompts, MAX_TOKENS)
        warm = generate(engine, prompts, MAX_TOKENS)
        cached = engine.stats().cached_tokens
    check(alone, cold)
    check(alone, warm)
    assert cached == (0 if prefix_cache == "none" else sum((n - 1) // 16 * 16 for n in LENGTHS))


def test_after_preemption(
    artifact: Artifact, prompts: Sequence[Sequence[int]], alone: Sequence[Continuation]
) -> None:
    with open_engine(artifact, EngineSettings(runtime="iree", pages=13)) as engine:
        got = generate(engine, prompts, MAX_TOKENS)
        assert engine.stats().preemptions > 0
    check(alone, got)


def test_a_conversation_is_never_prefilled_twice(artifact: Artifact) -> None:
    """Each turn computes its new tokens and less than two pages more."""
    turn, token_ids = list(b"What is next? "), list(b"You count. ")
    with open_engine(artifact, EngineSettings(runtime="iree")) as engine:
        for _ in range(6):
            token_ids += turn
            before = engine.stats().cached_tokens
            [answer] = generate(engine, [token_ids], 9)
            cached = engine.stats().cached_tokens - before
            assert cached >= len(token_ids) - len(turn) - 9 - 2 * artifact.config.stride
            token_ids += answer.token_ids
    assert cached > 5 * artifact.config.stride
