"""The batching modes give the same tokens under any arrivals, bit for bit, so without a tolerance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.batching.mode import BatchModeName, BatchSettings
from shortfin_apps.llm.components.kvcache import PrefixCache
from shortfin_apps.llm.components.runtime.open import Runtime
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from tests.integration.generation import Continuation, assert_all_same, generate, open_engine
from tests.runtimes import RUNTIMES

MAX_TOKENS = 12
TOLERANCE = 0.02  # as in test_same_tokens.py
LENGTHS = (1, 2, 16, 17, 63, 80, 130, 300)
SHARED = 48  # length of the prefix shared by the longer half of the prompts
STRIDE = 16


@dataclass(frozen=True)
class Traffic:
    """The prompts, the step before which each arrives, and the batching options."""

    prompts: tuple[int, ...]
    arrivals: tuple[int, ...]
    chunk_tokens: int | None
    token_budget: int
    prefix_cache: PrefixCache


@st.composite
def traffics(draw: st.DrawFn) -> Traffic:
    prompts = draw(st.lists(st.sampled_from(range(len(LENGTHS))), min_size=1, max_size=12))
    arrivals = draw(st.lists(st.integers(0, 20), min_size=len(prompts), max_size=len(prompts)))
    return Traffic(
        prompts=tuple(prompts),
        arrivals=tuple(arrivals),
        chunk_tokens=draw(st.sampled_from([None, 16, 48, 64, 112, 160])),
        token_budget=draw(st.integers(2, 20)) * STRIDE,
        prefix_cache=draw(st.sampled_from(["none", "trie"])),
    )


@pytest.fixture(scope="module")
def prompts(tiny_artifact: Artifact) -> list[list[int]]:
    assert tiny_artifact.vocab_size is not None
    random = np.random.default_rng(11)
    made = [random.integers(0, tiny_artifact.vocab_size, n).tolist() for n in LENGTHS]
    return [made[-1][:SHARED] + p[SHARED:] if len(p) > SHARED else p for p in made]


@pytest.fixture(scope="module")
def alone(tiny_artifact: Artifact, prompts: Sequence[Sequence[int]]) -> list[Continuation]:
    """The tokens of each prompt when it runs alone and whole, in the default mode."""
    options = EngineSettings(
        runtime="iree", prefix_cache="none", batching=BatchSettings(batch_mode="default", chunk_tokens=512)
    )
    with open_engine(tiny_artifact, options) as engine:
        return [generate(engine, [prompt], MAX_TOKENS)[0] for prompt in prompts]


@pytest.mark.parametrize("runtime", RUNTIMES)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(traffic=traffics())
def test_the_modes_agree(
    tiny_artifact: Artifact,
    prompts: Sequence[Sequence[int]],
    alone: Sequence[Continuation],
    runtime: Runtime,
    traffic: Traffic,
) -> None:
    pairs: tuple[tuple[BatchModeName, bool], ...]
    pairs = (("default", False), ("default", True), ("extend-attention", True))
    for mode, with_budget in pairs:
        mode_options = BatchSettings(
            batch_mode=mode,
            chunk_tokens=traffic.chunk_tokens,
            token_budget=traffic.token_budget if with_budget else None,
        )
        options = EngineSettings(runtime=runtime, batching=mode_options, prefix_cache=traffic.prefix_cache)
        with open_engine(tiny_artifact, options) as engine:
            crowd = [prompts[index] for index in traffic.prompts]
            got = generate(engine, crowd, MAX_TOKENS, traffic.arrivals)
            used = {name.split("_")[0] for name in engine.stats().entries}
        assert [c.token_ids for c in got] == [alone[index].token_ids for index in traffic.prompts]
        is_packed = mode == "extend-attention"
        assert used <= {"extend", "decode"} if is_packed else {"prefill", "decode"} <= used


def test_after_preemption(tiny_artifact: Artifact) -> None:
    """Twelve requests that grow from one page to three, in 25 pages. The output of a preempted one is then
    recomputed as a prefill, whose sums have another order, so near ties may differ.
    """
    options = EngineSettings(
        runtime="iree", batching=BatchSettings(batch_mode="extend-attention"), prefix_cache="none", pages=26
    )
    prompts = [[index] for index in range(12)]
    with open_engine(tiny_artifact, options) as engine:
        alone = [generate(engine, [prompt], 40)[0] for prompt in prompts]
        assert engine.stats().preemptions == 0
        together = generate(engine, prompts, 40)
        assert engine.stats().preemptions > 0
    assert_all_same(alone, together, TOLERANCE, 40)
