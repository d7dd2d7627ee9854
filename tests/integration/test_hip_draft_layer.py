"""A model that drafts with its own layer gives the same tokens as without on AMD GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.builder.builder import build
from shortfin_apps.llm.builder.progress import QuietProgress
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from tests.hip import EmulatedGpus
from tests.integration.byte_models import write_byte_model
from tests.integration.generation import generate, open_engine
from tests.integration.test_draft_layer import drafting

pytest.importorskip("triton", reason="Triton is not installed")

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(600)]

CHIP = "gfx942"
OPTIONS = BuildOptions(
    device=f"hip:{CHIP}",
    context_length=128,
    prefill_batch_sizes=(2,),
    decode_batch_sizes=(4,),
    extend_sizes=(64,),
    top_k=8,
)


@pytest.fixture
def artifact(emulated_gpus: EmulatedGpus, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Artifact]:
    folder = tmp_path_factory.mktemp("drafting")
    source = write_byte_model("qwen35", folder / "source", drafts=True)
    built = build(str(source), folder / "artefact", OPTIONS, QuietProgress())
    with emulated_gpus.watch(CHIP):
        yield built


def test_tokens_are_those_without(artifact: Artifact) -> None:
    """Decode loops draw the tokens without drafts, and keep hidden states too.

    Entries of other numbers of rows round differently here, so log-probabilities are not compared.
    """
    rng, count = np.random.default_rng(3), 9
    prompts = [rng.integers(0, 256, length).tolist() for length in (3, 16, 17, 20)]
    with open_engine(artifact, EngineSettings(device="hip")) as engine:
        expected = [each.token_ids for each in generate(engine, prompts, count)]
    texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, expected, strict=True)]
    with drafting(artifact, texts, device="hip") as engine:
        assert [each.token_ids for each in generate(engine, prompts, count)] == expected
