"""An AMD GPU gives the tokens that the CPU gives, whatever the mode, the chunks and the state of the cache.

The artefact is the same model compiled for the chip, its logits differ by rounding: TOLERANCE is that of
test_same_tokens.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.batching.mode import BatchModeName, BatchSettings
from shortfin_apps.llm.components.kvcache import PrefixCache
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from tests.conftest import BuildTiny
from tests.hip import CHIPS, EmulatedGpus
from tests.integration.generation import Continuation, assert_all_same, generate, open_engine
from tests.runtimes import needs_shortfin

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(300)]

TOLERANCE = 0.1  # both are rounded to bf16, at other places
MAX_TOKENS = 6
LENGTHS = (1, 15, 16, 17, 63, 130)
SHARED = 48  # tokens that the longer prompts begin with
GROWING, NUM_GROWING = 15, 4  # prompts that fill a page and begin a second one while they decode
PAGES = 8  # of which 7 can be leased, one fewer than they need in the end


@pytest.fixture(scope="module")
def prompts(tiny_artifact: Artifact) -> list[list[int]]:
    assert tiny_artifact.vocab_size is not None
    random = np.random.default_rng(5)
    made = [random.integers(0, tiny_artifact.vocab_size, n).tolist() for n in LENGTHS]
    for prompt in made:
        if len(prompt) > SHARED:
            prompt[:SHARED] = made[-1][:SHARED]
    return made


@pytest.fixture(scope="module")
def on_cpu(tiny_artifact: Artifact, prompts: Sequence[Sequence[int]]) -> list[Continuation]:
    """The tokens of each prompt when it runs alone on the CPU."""
    with open_engine(tiny_artifact, EngineSettings(runtime="iree", prefix_cache="none")) as engine:
        return [generate(engine, [prompt], MAX_TOKENS)[0] for prompt in prompts]


@pytest.fixture(params=CHIPS)
def artifact(
    request: pytest.FixtureRequest, build_tiny: BuildTiny, emulated_gpus: EmulatedGpus
) -> Iterator[Artifact]:
    with emulated_gpus.watch(request.param):
        # Few buckets, as every engine first runs each of them once; test_hip_entries.py has them all.
        options = BuildOptions(
            device=f"hip:{request.param}",
            prefill_batch_sizes=(2,),
            decode_batch_sizes=(4,),
            extend_sizes=(64,),
        )
        yield build_tiny(options)


def check(expected: Sequence[Continuation], got: Sequence[Continuation]) -> None:
    assert_all_same(expected, got, TOLERANCE, MAX_TOKENS)


@pytest.mark.parametrize("prefix_cache", ["none", "trie"])
@pytest.mark.parametrize(
    "mode",
    [
        BatchSettings(batch_mode="default", chunk_tokens=32),
        BatchSettings(batch_mode="default"),
        BatchSettings(batch_mode="extend-attention", token_budget=80),
    ],
    ids=["chunks", "whole", "extend"],
)
def test_tokens_are_those_of_the_cpu(
    artifact: Artifact,
    prompts: Sequence[Sequence[int]],
    on_cpu: Sequence[Continuation],
    mode: BatchSettings,
    prefix_cache: PrefixCache,
) -> None:
    options = EngineSettings(device="hip", batching=mode, prefix_cache=prefix_cache)
    with open_engine(artifact, options) as engine:
        check(on_cpu, generate(engine, prompts, MAX_TOKENS))
        if prefix_cache == "trie":
            check(on_cpu, generate(engine, prompts, MAX_TOKENS))
        assert (engine.stats().cached_tokens > 0) == (prefix_cache == "trie")


@pytest.mark.parametrize(
    "mode",
    [BatchSettings(batch_mode="default"), BatchSettings(batch_mode="extend-attention", token_budget=80)],
    ids=["default", "extend"],
)
def test_preempted_requests_lose_nothing(
    artifact: Artifact,
    prompts: Sequence[Sequence[int]],
    on_cpu: Sequence[Continuation],
    mode: BatchSettings,
) -> None:
    growing = LENGTHS.index(GROWING)
    options = EngineSettings(device="hip", batching=mode, pages=PAGES, prefix_cache="none")
    with open_engine(artifact, options) as engine:
        got = generate(engine, [prompts[growing]] * NUM_GROWING, MAX_TOKENS)
        assert engine.stats().preemptions > 0
    check([on_cpu[growing]] * NUM_GROWING, got)


@pytest.mark.parametrize("mode", ["default", "extend-attention"])
def test_dynamic_entries_give_the_same_tokens(
    artifact: Artifact,
    prompts: Sequence[Sequence[int]],
    on_cpu: Sequence[Continuation],
    mode: BatchModeName,
) -> None:
    """Their tokens are drawn by `sample` entries, also of steps that are queued ahead."""
    options = EngineSettings(device="hip", batching=BatchSettings(batch_mode=mode), static_threshold=0)
    with open_engine(artifact, options) as engine:
        check(on_cpu, generate(engine, prompts, MAX_TOKENS))
        assert {name.split("_")[0] for name in engine.stats().entries} <= {
            "prefill",
            "extend",
            "sample",
            "logprobs",
        }
        assert engine.stats().steps_ahead > 0


@needs_shortfin  # without it, all tests above run on iree.runtime
def test_iree_runtime_gives_the_same_tokens(
    artifact: Artifact, prompts: Sequence[Sequence[int]], on_cpu: Sequence[Continuation]
) -> None:
    options = EngineSettings(
        device="hip", runtime="iree", batching=BatchSettings(batch_mode="extend-attention", token_budget=80)
    )
    with open_engine(artifact, options) as engine:
        check(on_cpu, generate(engine, prompts, MAX_TOKENS))


@pytest.mark.parametrize(("chip", "mode"), [("gfx942", "default"), ("gfx1100", "extend-attention")])
def test_decodes_in_one_launch_give_the_same_tokens(
    chip: str,
    mode: BatchModeName,
    prompts: Sequence[Sequence[int]],
    on_cpu: Sequence[Continuation],
    build_tiny: BuildTiny,
    emulated_gpus: EmulatedGpus,
) -> None:
    options = BuildOptions(
        device=f"hip:{chip}",
        prefill_batch_sizes=(2,),
        decode_batch_sizes=(4,),
        extend_sizes=(64,),
        one_launch=True,
    )
    settings = EngineSettings(device="hip", batching=BatchSettings(batch_mode=mode))
    with emulated_gpus.watch(chip) as control:
        with open_engine(build_tiny(options), settings) as engine:
            check(on_cpu, generate(engine, prompts, MAX_TOKENS))
            assert engine.stats().steps_ahead > 0
        assert "decode_layers_4" in control.report().kernels
