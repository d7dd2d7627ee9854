"""A model whose layers all have a window gives the same tokens, from fewer pages than its requests have."""

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
WINDOW = 37
LENGTHS = (1, 15, 16, 17, 33, 64, 130)
OPTIONS = BuildOptions(
    context_length=256, prefill_batch_sizes=(1, 2), decode_batch_sizes=(2, 8), decode_loop_sizes=(8,), top_k=8
)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The golden model with a window and a vocabulary of bytes."""
    folder = tmp_path_factory.mktemp("windows")
    source = write_byte_model("phi3", folder / "source", sliding_window=WINDOW)
    made = build(str(source), folder / "artefact", OPTIONS, QuietProgress())
    assert (made.config.window_tokens, len(made.config.page_elements)) == (WINDOW, 1)
    return made


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
    for got in (cold, warm):
        assert_all_same(alone, got, TOLERANCE, MAX_TOKENS)
    assert cached == (0 if prefix_cache == "none" else sum((n - 1) // 16 * 16 for n in LENGTHS))


@pytest.mark.parametrize("prefix_cache", ["none", "trie"])
def test_in_fewer_pages_than_the_longest_request_has(
    artifact: Artifact,
    prompts: Sequence[Sequence[int]],
    alone: Sequence[Continuation],
    prefix_cache: PrefixCache,
) -> None:
    """8 pages beside the scratch page, where 150 tokens fill 10: others are taken by then."""
    chunks = BatchSettings(batch_mode="default", chunk_tokens=16)
    options = EngineSettings(runtime="iree", pages=9, prefix_cache=prefix_cache, batching=chunks)
    with open_engine(artifact, options) as engine:
        for _ in range(2):
            got = generate(engine, prompts, MAX_TOKENS)
            assert_all_same(alone, got, TOLERANCE, MAX_TOKENS)
        usage = engine.stats().window_pages
    assert usage is not None
    assert (usage.total, usage.leased) == (8, 0)
