"""Static entries that are off change no answer, and their batches run on dynamic entries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.batching.mode import BatchModeName, BatchSettings
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.runtime.open import Runtime
from shortfin_apps.llm.contract.abi import Entry, EntryClass
from shortfin_apps.llm.contract.self_test_file import SelfTestFile
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from shortfin_apps.llm.serving.loading import ModelFacts
from tests.conftest import BuildTiny
from tests.integration.generation import Continuation, generate, open_engine
from tests.runtimes import RUNTIMES

MAX_TOKENS = 10
LENGTHS = (1, 16, 17, 40, 64, 130)
OPTIONS = BuildOptions(
    prefill_batch_sizes=(1, 4),
    decode_batch_sizes=(1, 4, 8),
    decode_loop_sizes=(1, 4, 8),
    chunk_sizes=(32,),
    extend_sizes=(16, 64),
)
THRESHOLDS = (0, 1, 4, 16, 32, 64, 128)


@dataclass(frozen=True)
class Traffic:
    """The prompts, the step before which each arrives, and the engine's options."""

    prompts: tuple[int, ...]
    arrivals: tuple[int, ...]
    mode: BatchModeName
    threshold: int
    depth: int


@st.composite
def traffics(draw: st.DrawFn) -> Traffic:
    prompts = draw(st.lists(st.sampled_from(range(len(LENGTHS))), min_size=1, max_size=8))
    return Traffic(
        prompts=tuple(prompts),
        arrivals=tuple(draw(st.integers(0, 8)) for _ in prompts),
        mode=draw(st.sampled_from(["default", "extend-attention"])),
        threshold=draw(st.sampled_from(THRESHOLDS)),
        depth=draw(st.integers(0, 2)),
    )


@pytest.fixture(scope="module")
def artifact(build_tiny: BuildTiny) -> Artifact:
    return build_tiny(OPTIONS)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = np.random.default_rng(13)
    return [random.integers(0, 256, n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def alone(artifact: Artifact, prompts: Sequence[Sequence[int]]) -> list[Continuation]:
    """The tokens of each prompt when it runs alone, on any entry."""
    with open_engine(artifact, EngineSettings(runtime="iree", prefix_cache="none")) as engine:
        return [generate(engine, [prompt], MAX_TOKENS)[0] for prompt in prompts]


def invocations(engine: Engine) -> Counter[EntryClass]:
    """How often entries of each class ran."""
    found = Counter[EntryClass]()
    for name, counts in engine.stats().entries.items():
        entry = Entry.parse(name)
        assert entry is not None
        found[entry.entry_class()] += counts.invocations
    return found


def largest_bucket(engine: Engine) -> int:
    """The size in tokens of the largest static entry that ran; 0 if none did."""
    entries = map(Entry.parse, engine.stats().entries)
    return max((entry.bucket_tokens or 0 for entry in entries if entry is not None), default=0)


@pytest.mark.parametrize("runtime", RUNTIMES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(traffic=traffics())
def test_tokens_are_the_same_with_any_threshold(
    artifact: Artifact,
    prompts: Sequence[Sequence[int]],
    alone: Sequence[Continuation],
    runtime: Runtime,
    traffic: Traffic,
) -> None:
    options = EngineSettings(
        runtime=runtime,
        static_threshold=traffic.threshold,
        pipeline_depth=traffic.depth,
        batching=BatchSettings(batch_mode=traffic.mode, token_budget=96),
    )
    with open_engine(artifact, options) as engine:
        crowd = [prompts[index] for index in traffic.prompts]
        got = generate(engine, crowd, MAX_TOKENS, traffic.arrivals)
        largest = largest_bucket(engine)
    assert [c.token_ids for c in got] == [alone[index].token_ids for index in traffic.prompts]
    assert largest <= traffic.threshold


@pytest.mark.parametrize("mode", ["default", "extend-attention"])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_threshold_moves_invocations_to_dynamic_entries(
    artifact: Artifact, prompts: Sequence[Sequence[int]], mode: BatchModeName, depth: int
) -> None:
    ran, largest, steps_ahead = {}, {}, {}
    for threshold in (None, 4, 0):
        options = EngineSettings(
            runtime="iree",
            static_threshold=threshold,
            pipeline_depth=depth,
            batching=BatchSettings(batch_mode=mode),
        )
        with open_engine(artifact, options) as engine:
            generate(engine, prompts, MAX_TOKENS)
            ran[threshold], largest[threshold] = invocations(engine), largest_bucket(engine)
            steps_ahead[threshold] = engine.stats().steps_ahead
    assert largest[None] > 4 >= largest[4] > largest[0] == 0
    assert ran[None][EntryClass.DYNAMIC] < ran[0][EntryClass.DYNAMIC]
    assert ran[0][EntryClass.STATIC] == 0
    assert all((number > 0) == (depth > 0) for number in steps_ahead.values())  # loops, or `sample` entries


@pytest.mark.parametrize("threshold", [0, 4])
def test_the_self_test_and_the_measured_budget_take_the_remaining_entries(
    artifact: Artifact, prompts: Sequence[Sequence[int]], threshold: int
) -> None:
    assert artifact.self_test is not None
    facts = ModelFacts(self_test=SelfTestFile.load(artifact.self_test), same_bits=True)
    options = EngineSettings(runtime="iree", static_threshold=threshold)
    with open_engine(artifact, options, facts) as engine:
        engine.tune(on_gpu=False)
        generate(engine, prompts, MAX_TOKENS)
        assert engine.stats().self_tests == 1
        assert largest_bucket(engine) <= threshold
