"""Programs in the form of upstream's exporter on our engine, on both runtimes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shortfin_apps.llm.components.batching.mode import BatchSettings
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.kvcache import PrefixCache
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.runtime.device import Device
from shortfin_apps.llm.components.runtime.open import Runtime, open_device
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from shortfin_apps.llm.serving.loading import ModelFacts, make_engine
from tests.compat.upstream_abi import CONTEXT, STRIDE, VOCABULARY, Variant, compile_to, continuation
from tests.runtimes import RUNTIMES

VARIANTS = {
    "logits": Variant(),
    "argmax": Variant(top_k=1),
    "logits, position": Variant(has_prefill_position=True),
    "argmax, position": Variant(has_prefill_position=True, top_k=1),
    "no batch of one": Variant(has_prefill_position=True, prefill_batch_sizes=(4,)),
}
COUNT = 3 * STRIDE
LENGTHS = (1, STRIDE - 1, STRIDE, STRIDE + 1, 2 * STRIDE, 3 * STRIDE + 1, CONTEXT - COUNT)
PROMPTS = [[(7 * length + 3 * i) % VOCABULARY for i in range(length)] for length in LENGTHS]

Compiled = Callable[[Variant], Path]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    folder = tmp_path_factory.mktemp("upstream-abi")
    made: dict[Variant, Path] = {}

    def get(variant: Variant) -> Path:
        if variant not in made:
            made[variant] = compile_to(folder / f"{len(made)}.vmfb", variant)
        return made[variant]

    return get


@pytest.fixture(params=RUNTIMES)
def runtime(request: pytest.FixtureRequest) -> Runtime:
    chosen: Runtime = request.param
    return chosen


def make(
    device: Device, vmfb: Path, config: ModelConfig, options: EngineSettings, vocab_size: int | None = None
) -> Engine:
    return make_engine(
        device, config, vmfb, (), frozenset(), options, ModelFacts(tokenizer_vocab_size=vocab_size)
    )


def generate(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy continuations of prompts that arrive together."""
    answers: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    params = SamplingParams(max_tokens=COUNT, temperature=0)
    for i, prompt in enumerate(prompts):
        engine.add(GenerateCall(request_id=str(i), prompt_token_ids=tuple(prompt), params=params))
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None, delta.error
            answers[delta.request_id] += delta.token_ids
    return list(answers.values())


EXPECTED = [continuation(prompt, COUNT) for prompt in PROMPTS]


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_prompts_alone_and_batched(runtime: Runtime, variant: Variant, compiled: Compiled) -> None:
    device = open_device("local-task", runtime)
    options = EngineSettings(prefix_cache="none")
    try:
        engine = make(device, compiled(variant), variant.config(pages=128), options)
        assert [generate(engine, [prompt])[0] for prompt in PROMPTS] == EXPECTED
        assert generate(engine, PROMPTS) == EXPECTED
    finally:
        device.close()


@pytest.mark.parametrize("prefix_cache", ["none", "trie"])
@pytest.mark.parametrize("chunk_pages", [1, 3])
def test_in_chunks_with_shared_prefixes_and_few_pages(
    runtime: Runtime, compiled: Compiled, chunk_pages: int, prefix_cache: PrefixCache
) -> None:
    variant = VARIANTS["argmax, position"]
    shared = PROMPTS[-1][: 2 * STRIDE]
    prompts = [shared + [i] * i for i in range(1, 2 * STRIDE)]
    mode = BatchSettings(batch_mode="default", chunk_tokens=chunk_pages * STRIDE)
    options = EngineSettings(prefix_cache=prefix_cache, batching=mode)
    device = open_device("local-task", runtime)
    try:
        engine = make(device, compiled(variant), variant.config(pages=16), options)
        expected = [continuation(prompt, COUNT) for prompt in prompts]
        for _ in range(2):
            assert generate(engine, prompts) == expected
        usage = engine.stats().pages
        assert usage.free + usage.cached == usage.total
        assert (engine.stats().cached_tokens > 0) == (prefix_cache == "trie")
    finally:
        device.close()


FAULTS = {  # and the field that the message names
    "position": "has_prefill_position",
    "page": "paged_kv_cache",
    "slabs": "paged_kv_cache",
    "stride": "block_seq_stride",
    "dtype": "paged_kv_cache",
    "top_k": "top_k",
    "wide top_k": "top_k",
    "batch": "decode_bs2",
    "module": "module_name",
}


def _wrong(config: ModelConfig) -> dict[str, ModelConfig]:
    cache = config.paged_kv_cache
    return {
        "position": replace(config, has_prefill_position=not config.has_prefill_position),
        "page": replace(
            config, paged_kv_cache=replace(cache, paged_kv_block_size_elements_per_device=(STRIDE,))
        ),
        "slabs": replace(
            config,
            paged_kv_cache=replace(cache, paged_kv_block_size_elements_per_device=(STRIDE, STRIDE)),
        ),
        "stride": replace(config, paged_kv_cache=replace(cache, block_seq_stride=2 * STRIDE)),
        "dtype": replace(config, paged_kv_cache=replace(cache, kv_cache_dtype="float32")),
        "top_k": replace(config, top_k=1 if config.top_k is None else None),
        "wide top_k": replace(config, top_k=4),
        "batch": replace(config, decode_batch_sizes=(2, 4)),
        "module": replace(config, module_name="other"),
    }


@pytest.mark.parametrize("name", ["logits", "argmax, position"])
@pytest.mark.parametrize(("fault", "field"), FAULTS.items(), ids=FAULTS)
def test_a_config_of_another_program_is_refused_at_start(
    runtime: Runtime, compiled: Compiled, name: str, fault: str, field: str
) -> None:
    """Upstream's programs declare no types, so some mismatches only show in the first run."""
    variant = VARIANTS[name]
    device = open_device("local-task", runtime)
    try:
        with pytest.raises(ArtifactError, match=field) as caught:
            make(device, compiled(variant), _wrong(variant.config())[fault], EngineSettings())
        assert "\n" not in str(caught.value)
    finally:
        device.close()


@pytest.mark.parametrize("name", ["logits", "logits, position"])
def test_a_tokenizer_of_a_larger_vocabulary_is_refused(
    runtime: Runtime, compiled: Compiled, name: str
) -> None:
    """The width of the logits gives the vocabulary, in the first run if not before."""
    variant = VARIANTS[name]
    device = open_device("local-task", runtime)
    try:
        make(device, compiled(variant), variant.config(), EngineSettings(), VOCABULARY)
        with pytest.raises(ArtifactError, match=f"{VOCABULARY + 1} tokens but the model only {VOCABULARY}"):
            make(
                device,
                compiled(variant),
                variant.config(),
                EngineSettings(),
                VOCABULARY + 1,
            )
    finally:
        device.close()


def test_chunks_are_refused_for_a_model_without_prefill_position(compiled: Compiled) -> None:
    """Like upstream, whose `--chunk_block_size` needs `has_prefill_position`."""
    variant = VARIANTS["logits"]
    options = EngineSettings(batching=BatchSettings(batch_mode="default", chunk_tokens=STRIDE))
    device = open_device("local-task", "iree")
    try:
        with pytest.raises(ArtifactError, match="--chunk-tokens"):
            make(device, compiled(variant), variant.config(), options)
    finally:
        device.close()


def test_the_reference_depends_on_every_token_and_its_position() -> None:
    prompt = [3, 1, 4, 1, 5]
    rows = [continuation(np.roll(prompt, shift).tolist(), 1) for shift in range(5)]
    assert len({row[0] for row in rows}) > 1
    assert continuation([*prompt[:-1], 6], 1) != continuation(prompt, 1)
