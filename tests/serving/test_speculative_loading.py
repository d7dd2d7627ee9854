from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.builder.sources.random_tiny import SPEC
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.runtime.open import open_device
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.model.draft_layer import DraftLayer as DraftBlocks
from shortfin_apps.llm.serving import speculative_loading
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from shortfin_apps.llm.serving.loading import ModelFacts, make_engine
from shortfin_apps.llm.serving.speculative_loading import DraftFiles, load_draft_program
from tests.components.self_test.compiled import build_model
from tests.conftest import DRAFT_OPTIONS, BuildTiny


def files_of(artifact: Artifact, **changes: Any) -> DraftFiles:
    files = DraftFiles(config=artifact.config, vmfb=artifact.vmfb, parameters=artifact.parameters)
    return replace(files, **changes)


@pytest.mark.slow
def test_a_draft_model_has_pages_for_all_tokens_of_the_models(
    tiny_artifact: Artifact, build_tiny: BuildTiny
) -> None:
    draft = build_tiny(replace(DRAFT_OPTIONS, block_seq_stride=32))
    with closing(open_device()) as device:
        loaded = load_draft_program(device, files_of(draft), None, 4, 8)
        assert loaded.num_pages(320) == 11
        assert loaded.num_pages(321) == 12
        most = 4 * SPEC.max_position_embeddings // 32
        assert loaded.num_pages(1 << 30) == 1 + most  # what the requests that run can have
        assert loaded.num_bytes(640) - loaded.num_bytes(320) == 10 * sum(draft.config.page_elements) * 2


def test_the_models_pages_leave_room_for_the_draft_models(
    build_tiny: BuildTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact, spare = build_tiny(DRAFT_OPTIONS), 5 << 20
    files = (artifact.config, artifact.vmfb, artifact.parameters, frozenset[int]())
    totals = []
    with closing(open_device()) as device:
        monkeypatch.setattr(device, "spare_bytes", lambda stage: spare)
        for draft in (None, files_of(artifact)):
            options = EngineSettings(pages="auto", max_running=200)
            totals.append(
                make_engine(device, *files, options, ModelFacts(draft_model=draft)).stats().pages.total
            )
    assert totals[0] / 2 * 0.9 < totals[1] < totals[0] / 2


def test_a_draft_model_that_cannot_go_back_is_refused_by_its_name(
    tiny_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_artifact.config
    monkeypatch.setattr(speculative_loading, "check_program", lambda *args: None)
    with closing(open_device()) as device:
        cache = replace(config.paged_kv_cache, pools={"state": 1})
        files = files_of(tiny_artifact, config=replace(config, paged_kv_cache=cache))
        with pytest.raises(ArtifactError, match=r"the draft model: .* keep a state.*`--speculative-model`"):
            load_draft_program(device, files, None, 4, 8)


def test_a_draft_model_that_cannot_draw_is_refused_by_its_name(tiny_artifact: Artifact) -> None:
    how = r"the draft model: .* cannot draw .* build it with `--decode-loop-sizes 1,2,4,8,16,32`"
    with closing(open_device()) as device, pytest.raises(ArtifactError, match=how):
        load_draft_program(device, files_of(tiny_artifact), None, 4, 8)


def test_what_a_round_takes_is_measured_beside_a_decode_of_the_model(
    build_tiny: BuildTiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    taken = iter([0.25, 1.0])  # of the draft model, and of the model
    monkeypatch.setattr(speculative_loading, "decode_s", lambda runner, num_runs: next(taken))
    caplog.set_level("INFO")
    artifact = build_tiny(DRAFT_OPTIONS)
    files = (artifact.config, artifact.vmfb, artifact.parameters, frozenset[int]())
    with closing(open_device()) as device:
        make_engine(device, *files, EngineSettings(), ModelFacts(draft_model=files_of(artifact)))
    assert "a decode takes 25 % of the model's time" in caplog.text


def test_a_draft_model_may_have_a_draft_layer_which_is_not_used(tmp_path: Path) -> None:
    """Its entries keep hidden states for as many requests as run. Here, it is the model itself."""
    spec = replace(SPEC, draft=DraftBlocks(blocks=SPEC.layers[0]))
    built = build_model(tmp_path, spec, DRAFT_OPTIONS)
    files = (built.config, built.vmfb, [built.parameters], frozenset[int]())
    draft = DraftFiles(config=built.config, vmfb=built.vmfb, parameters=[built.parameters], round_cost=0.0)
    with closing(open_device()) as device:
        engine = make_engine(device, *files, EngineSettings(max_running=20), ModelFacts(draft_model=draft))
        for number in range(20):
            params = SamplingParams(max_tokens=24, ignore_eos=True)
            prompt = tuple(range(32 + number, 64 + number))
            engine.add(GenerateCall(request_id=str(number), prompt_token_ids=prompt, params=params))
        while engine.has_work:
            assert all(delta.error is None for delta in engine.step())
        counts = engine.stats().speculation
        assert counts is not None
        assert counts.accepted > 100


def test_more_drafted_tokens_than_the_device_has_places_for_are_refused(tiny_artifact: Artifact) -> None:
    artifact = tiny_artifact
    files = (artifact.config, artifact.vmfb, artifact.parameters, frozenset[int]())
    options, facts = EngineSettings(speculative_tokens=16), ModelFacts(draft_model=files_of(artifact))
    with (
        closing(open_device()) as device,
        pytest.raises(ArtifactError, match=r"at most 15 with a draft model"),
    ):
        make_engine(device, *files, options, facts)
