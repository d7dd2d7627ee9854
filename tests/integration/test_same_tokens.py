"""A prompt gives the same tokens whatever else is in its batch, and however it is chunked, cached or run.

If the two best logits are within TOLERANCE, either token is accepted and the comparison ends there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.batching.mode import BatchSettings
from shortfin_apps.llm.components.kvcache import PrefixCache
from shortfin_apps.llm.components.runtime.open import Runtime
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from tests.conftest import TINY_OPTIONS, BuildTiny
from tests.integration.generation import Continuation, assert_all_same, assert_same, generate, open_engine
from tests.matrices import slow_but
from tests.runtimes import RUNTIMES

TOLERANCE = 0.02  # bf16 weights and K/V; sums are f32
MAX_TOKENS = 24
LENGTHS = (1, 15, 16, 17, 64, 127, 130, 300)


@pytest.fixture(scope="module")
def prompts(tiny_artifact: Artifact) -> list[list[int]]:
    assert tiny_artifact.vocab_size is not None
    random = np.random.default_rng(7)
    return [random.integers(0, tiny_artifact.vocab_size, n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def alone(tiny_artifact: Artifact, prompts: Sequence[Sequence[int]]) -> list[Continuation]:
    """The tokens of each prompt when it runs alone and whole, without a prefix cache."""
    options = EngineSettings(
        runtime="iree", prefix_cache="none", batching=BatchSettings(batch_mode="default", chunk_tokens=512)
    )
    with open_engine(tiny_artifact, options) as engine:
        return [generate(engine, [prompt], MAX_TOKENS)[0] for prompt in prompts]


def check(alone: Sequence[Continuation], got: Sequence[Continuation]) -> None:
    assert_all_same(alone, got, TOLERANCE, MAX_TOKENS)


def test_outputs_differ_from_each_other(alone: Sequence[Continuation]) -> None:
    assert len({c.token_ids for c in alone}) == len(alone)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("prefix_cache", ["none", "trie"])
@pytest.mark.parametrize("chunk_tokens", slow_but([None, 48], [None, 16, 32, 48, 128, 512]))
def test_batched_and_chunked(
    tiny_artifact: Artifact,
    prompts: Sequence[Sequence[int]],
    alone: Sequence[Continuation],
    runtime: Runtime,
    prefix_cache: PrefixCache,
    chunk_tokens: int | None,
) -> None:
    mode = BatchSettings(batch_mode="default", chunk_tokens=chunk_tokens)
    options = EngineSettings(runtime=runtime, prefix_cache=prefix_cache, batching=mode)
    with open_engine(tiny_artifact, options) as engine:
        cold = generate(engine, prompts, MAX_TOKENS)
        warm = generate(engine, prompts, MAX_TOKENS)
        cached = engine.stats().cached_tokens
    check(alone, cold)
    check(alone, warm)
    assert cached == (0 if prefix_cache == "none" else sum((n - 1) // 16 * 16 for n in LENGTHS))


@pytest.mark.parametrize("size", slow_but([1, 3, 32], [1, 2, 3, 4, 7, 8, 16, 31, 32]))
def test_in_every_decode_bucket(
    tiny_artifact: Artifact, prompts: Sequence[Sequence[int]], alone: Sequence[Continuation], size: int
) -> None:
    """`size` requests at once; prompts are repeated so that all rows are used."""
    crowd = [index % len(prompts) for index in range(size)]
    mode = BatchSettings(batch_mode="default")
    options = EngineSettings(runtime="iree", prefix_cache="none", batching=mode)
    with open_engine(tiny_artifact, options) as engine:
        got = generate(engine, [prompts[index] for index in crowd], MAX_TOKENS)
        used = engine.stats().entries
    for index, continuation in zip(crowd, got, strict=True):
        assert_same(alone[index], continuation.token_ids, TOLERANCE)
    bucket = min(n for n in (1, 2, 4, 8, 16, 32) if n >= size)
    assert f"decode_bs{bucket}" in used


def test_after_preemption(
    tiny_artifact: Artifact, prompts: Sequence[Sequence[int]], alone: Sequence[Continuation]
) -> None:
    """The page pool holds little more than the largest request."""
    with open_engine(tiny_artifact, EngineSettings(runtime="iree", pages=26)) as engine:
        got = generate(engine, prompts, MAX_TOKENS)
        assert engine.stats().preemptions > 0
    check(alone, got)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_with_keys_and_values_in_bytes(
    build_tiny: BuildTiny, prompts: Sequence[Sequence[int]], runtime: Runtime
) -> None:
    """Alone, in chunks, shared and preempted: a token reads K and V of its own chunk like all others."""
    artifact = build_tiny(replace(TINY_OPTIONS, kv="q8_0"))
    whole = EngineSettings(
        runtime=runtime, prefix_cache="none", batching=BatchSettings(batch_mode="default", chunk_tokens=512)
    )
    with open_engine(artifact, whole) as engine:
        expected = [generate(engine, [prompt], MAX_TOKENS)[0] for prompt in prompts]
    chunks = BatchSettings(batch_mode="default", chunk_tokens=16)
    with open_engine(
        artifact, EngineSettings(runtime=runtime, batching=chunks, prefix_cache="trie")
    ) as engine:
        for _ in range(2):
            check(expected, generate(engine, prompts, MAX_TOKENS))
        assert engine.stats().cached_tokens > 0
    packed = BatchSettings(batch_mode="extend-attention", token_budget=80)
    with open_engine(artifact, EngineSettings(runtime=runtime, batching=packed, pages=26)) as engine:
        check(expected, generate(engine, prompts, MAX_TOKENS))
        assert engine.stats().preemptions > 0


def test_the_last_position_of_the_context(tiny_artifact: Artifact) -> None:
    config = tiny_artifact.config
    prompt = [5] * (config.max_seq_len - 3)
    with open_engine(tiny_artifact, EngineSettings(runtime="iree")) as engine:
        assert len(generate(engine, [prompt], 3)[0].token_ids) == 3


def test_a_run_repeats_bit_for_bit(tiny_artifact: Artifact, prompts: Sequence[Sequence[int]]) -> None:
    def run() -> list[Continuation]:
        with open_engine(tiny_artifact, EngineSettings(runtime="iree")) as engine:
            return generate(engine, prompts, MAX_TOKENS)

    assert run() == run()
