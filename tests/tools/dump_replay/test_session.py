"""What an engine did on a compiled model comes out the same in a replay, bit by bit, at every depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.gpu.adjusted import kinds
from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.batching.mode import BatchSettings
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.recorder.dump_file import read_dump
from shortfin_apps.llm.components.recorder.dumps import Dumps
from shortfin_apps.llm.components.recorder.flight_recorder import FlightRecorder
from shortfin_apps.llm.components.recorder.records import Draw, Header, Run, Step
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.runtime.open import open_device
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from shortfin_apps.llm.serving.loading import make_engine
from shortfin_apps.llm.tools.dump_replay.replay import Verdict
from shortfin_apps.llm.tools.dump_replay.session import Where, replay
from tests.conftest import BuildTiny
from tests.hip import EmulatedGpus

MODES = (BatchSettings(batch_mode="default"), BatchSettings(batch_mode="extend-attention", token_budget=80))
LENGTHS = (1, 15, 16, 40, 70, 90)
FEW_PAGES = 24


def work(engine: Engine, vocab_size: int, num_requests: int, max_tokens: int) -> None:
    """Requests of all kinds arrive one after the other; every fifth is aborted."""
    plain: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_k": 20}, {}, {"logprobs": 2}]
    params = [each for pair in zip(plain * 2, kinds(vocab_size), strict=True) for each in pair]
    for number in range(num_requests):
        prompt = tuple((7 * number + index) % 90 for index in range(LENGTHS[number % len(LENGTHS)]))
        options = {"temperature": 1.0, **params[number % len(params)]}
        sampling = SamplingParams(max_tokens=max_tokens, seed=number, **options)
        engine.add(GenerateCall(request_id=str(number), prompt_token_ids=prompt, params=sampling))
        for _ in range(3):
            engine.step()
        if number % 5 == 3:
            engine.abort(str(number))
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None


def dump_of(artifact: Artifact, options: EngineSettings, path: Path, *size: int) -> Path:
    """The dump of an engine after `work`."""
    recorder = FlightRecorder()
    device = open_device(options.device, "iree")
    files = artifact.config, artifact.vmfb, artifact.parameters
    engine = make_engine(device, *files, frozenset(), options, recorder=recorder)
    work(engine, artifact.vocab_size or 0, *size)
    stats = engine.stats()
    assert (stats.steps_ahead > 0) == bool(options.pipeline_depth)
    header = Header(num_pages=stats.pages.total + 1, stride=stats.page_tokens)
    written = Dumps(recorder, path, header).write("a test")
    device.close()
    return written.path


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.batch_mode)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_cpu_does_the_same_again(
    build_tiny: BuildTiny, tmp_path: Path, depth: int, mode: BatchSettings
) -> None:
    artifact = build_tiny(BuildOptions(decode_batch_sizes=(1, 8), decode_loop_sizes=(1, 8)))
    options = EngineSettings(batching=mode, pipeline_depth=depth, pages=FEW_PAGES)
    dump = read_dump(dump_of(artifact, options, tmp_path, 24, 30))
    summary = replay(dump, artifact.vmfb.parent, Where(runtime="iree"))
    assert summary.is_as_recorded
    assert summary.counts[Verdict.SAME] == sum(summary.counts.values()) > 50, summary
    assert any(isinstance(record, Step) for record in dump.recording.records) == (depth > 0)


@pytest.mark.emulated
@pytest.mark.timeout(300)
@pytest.mark.parametrize("depth", [0, 2])
def test_a_gpu_does_the_same_again(
    build_tiny: BuildTiny, emulated_gpus: EmulatedGpus, tmp_path: Path, depth: int
) -> None:
    options = EngineSettings(device="hip", batching=MODES[1], pipeline_depth=depth)
    with emulated_gpus.watch("gfx942"):
        artifact = build_tiny(BuildOptions(device="hip:gfx942", decode_batch_sizes=(8,)))
        dump = read_dump(dump_of(artifact, options, tmp_path, 10, 6))
        summary = replay(dump, artifact.vmfb.parent, Where(device="hip"))
    assert summary.is_as_recorded
    assert summary.counts[Verdict.SAME] == sum(summary.counts.values()) > 20, summary
    kinds_of_records = {type(record) for record in dump.recording.records}
    assert {Run, Draw} <= kinds_of_records
