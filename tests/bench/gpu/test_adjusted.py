from __future__ import annotations

import pytest

from bench.gpu import adjusted
from bench.gpu.models import MODELS
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from tests.conftest import BuildTiny
from tests.hip import EmulatedGpus
from tests.integration.generation import open_engine

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(300)]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_device_that_adjusts_rows_draws_the_tokens_of_the_host(
    build_tiny: BuildTiny, emulated_gpus: EmulatedGpus, depth: int
) -> None:
    model = MODELS["random-tiny"]
    with emulated_gpus.watch("gfx942"):
        artifact = build_tiny(BuildOptions(device="hip:gfx942", decode_batch_sizes=(8,)))
        with open_engine(artifact, EngineSettings(device="hip", pipeline_depth=0)) as engine:
            on_host = adjusted.tokens_of(engine, model, logprobs=0)  # which brings all logits to the host
            assert adjusted.num_adjusting(engine) == 0
        with open_engine(artifact, EngineSettings(device="hip", pipeline_depth=depth)) as engine:
            on_device = adjusted.tokens_of(engine, model)
            assert adjusted.num_adjusting(engine) >= adjusted.MAX_TOKENS
    assert on_device == on_host
    assert len({tuple(tokens) for tokens in on_host}) == len(on_host)
