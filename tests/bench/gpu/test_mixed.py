from __future__ import annotations

from contextlib import closing

import pytest

from bench.gpu import mixed
from bench.gpu.mixed import (
    LONGEST,
    OUTPUT_TOKENS,
    PLAIN,
    SAMPLINGS,
    SHORTEST,
    back_to_back_s,
    clients,
    measure,
    pages,
    prompt_lengths,
)
from bench.gpu.models import MODELS, Model
from bench.gpu.one_program import OneProgram
from shortfin_apps.llm.components.batching.mode import BatchModeName, BatchSettings
from shortfin_apps.llm.components.runtime.open import open_device
from shortfin_apps.llm.model.config import model_config
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from shortfin_apps.llm.serving.loading import make_engine
from tests.conftest import BuildTiny
from tests.hip import EmulatedGpus


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.name)
def test_all_clients_have_pages_for_their_longest_requests(model: Model) -> None:
    count = clients(model)
    lengths = prompt_lengths(model, count)
    assert (len(lengths), lengths[0], lengths[-1]) == (count, SHORTEST, LONGEST)
    assert lengths[-1] + OUTPUT_TOKENS <= model_config(model.spec, model.options).max_seq_len
    stride = model.options.block_seq_stride
    assert pages(model) > sum(-(-(length + OUTPUT_TOKENS) // stride) for length in lengths)
    assert count <= max(model.options.decode_batch_sizes)


@pytest.mark.emulated
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["default", "extend-attention"])
def test_a_gpu_has_the_next_step_queued_whatever_is_asked(
    build_tiny: BuildTiny, emulated_gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch, mode: BatchModeName
) -> None:
    model = MODELS["random-tiny"]
    for name, value in (("LONGEST", 40), ("OUTPUT_TOKENS", 6), ("ROUNDS", 1)):
        monkeypatch.setattr(mixed, name, value)
    options = EngineSettings(device="hip", batching=BatchSettings(batch_mode=mode), pipeline_depth=1)
    ahead = {}
    with emulated_gpus.watch("gfx942"):
        artifact = build_tiny(BuildOptions(device="hip:gfx942", decode_batch_sizes=(8,)))
        with closing(open_device("hip", "iree")) as opened:
            device, program = OneProgram(opened, artifact, "hip").recorded()
            files = artifact.config, artifact.vmfb, artifact.parameters
            engine = make_engine(device, *files, frozenset(), options)
            for sampling in SAMPLINGS:
                record = measure(engine, model, sampling).record()
                ahead[sampling] = record["ahead"]
                assert record["tokens_per_s"] > 0
            assert back_to_back_s(engine, model, "greedy", program, device) > 0
    assert min(ahead[sampling] for sampling in (*PLAIN, "presence penalty", "logprobs")) > 0.9, ahead
