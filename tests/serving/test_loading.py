from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.builder.sources.random_tiny import SPEC
from shortfin_apps.llm.components.batching.mode import BatchSettings
from shortfin_apps.llm.components.invocation.buckets import Buckets
from shortfin_apps.llm.components.kv_events import publisher as publisher_module
from shortfin_apps.llm.components.kv_events.options import KVEventsError, KVEventSettings
from shortfin_apps.llm.components.kv_events.publisher import KVEventPublisher
from shortfin_apps.llm.components.recorder.records import Header
from shortfin_apps.llm.components.runtime.device import Device
from shortfin_apps.llm.components.runtime.open import open_device
from shortfin_apps.llm.contract.errors import ArtifactError, SelfTestError
from shortfin_apps.llm.contract.self_test_file import SelfTestFile
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.serving import loading
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from shortfin_apps.llm.serving.loading import ModelFacts, load_engine, make_engine
from tests.components.engine_fixture import call
from tests.components.kv_events.subscriber import Index, Subscriber
from tests.conftest import BuildTiny

NO_EOS: frozenset[int] = frozenset()
CONTEXT_PAGES = SPEC.max_position_embeddings // BuildOptions().block_seq_stride


def test_a_page_table_of_the_scratch_page_alone_is_refused_and_the_device_closed(
    tiny_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    def open_and_watch(*args: object, **kwargs: object) -> Device:
        device = open_device()
        monkeypatch.setattr(device, "close", lambda: closed.append("closed"), raising=False)
        return device

    monkeypatch.setattr(loading, "open_device", open_and_watch)
    with pytest.raises(ArtifactError, match="--pages"):
        load_engine(
            tiny_artifact.config,
            tiny_artifact.vmfb,
            tiny_artifact.parameters,
            NO_EOS,
            EngineSettings(pages=1),
        )
    assert closed == ["closed"]


async def test_a_dump_directory_that_cannot_be_used_is_reported_before_serving(
    tiny_artifact: Artifact, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    engine = load_engine(
        tiny_artifact.config,
        tiny_artifact.vmfb,
        tiny_artifact.parameters,
        NO_EOS,
        EngineSettings(dump_dir=tmp_path / "file" / "dumps"),
        ModelFacts(dumps=Header()),
    )
    engine.start()
    await engine.close()
    assert "choose another --dump-dir" in caplog.text


async def test_kv_events_of_a_compiled_model_are_published_until_the_engine_closes(
    tiny_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[KVEventPublisher] = []

    class Opened(KVEventPublisher):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            opened.append(self)

    monkeypatch.setattr(publisher_module, "KVEventPublisher", Opened)
    config, loopback = tiny_artifact.config, "tcp://127.0.0.1:*"
    engine = load_engine(
        config,
        tiny_artifact.vmfb,
        tiny_artifact.parameters,
        NO_EOS,
        EngineSettings(
            kv_events=KVEventSettings(kv_events_endpoint=loopback, kv_events_replay_endpoint=loopback)
        ),
    )
    engine.start()
    prompt = list(range(3, 3 + 2 * config.stride))
    _ = [delta async for delta in engine.admit(call("a", prompt, max_tokens=2, salt="s"))]
    [publisher] = opened
    assert publisher.endpoint is not None
    with closing(Subscriber(publisher.endpoint, publisher.replay_endpoint)) as subscriber:
        index = Index(config.stride)
        for _, _, batch in subscriber.replay(0):
            index.apply(batch)
    whole = (("s",), tuple(prompt))
    assert set(index.stored.values()) == {(("s",), tuple(prompt[: config.stride])), whole}
    await engine.close()
    assert not publisher._thread.is_alive()


def test_kv_events_say_what_is_not_installed(
    tiny_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, publisher_module.__name__, None)
    options = EngineSettings(kv_events=KVEventSettings(kv_events_endpoint="tcp://127.0.0.1:*"))
    files = (tiny_artifact.config, tiny_artifact.vmfb, tiny_artifact.parameters, NO_EOS)
    with pytest.raises(KVEventsError, match="shortfin-llm\\[kv-events\\]"):
        load_engine(*files, options)


def test_a_pipeline_is_refused_without_decode_loops(build_tiny: BuildTiny) -> None:
    artifact = build_tiny(BuildOptions())
    files = (artifact.config, artifact.vmfb, artifact.parameters, NO_EOS)
    with pytest.raises(ArtifactError, match="--decode-loop-sizes"):
        load_engine(*files, EngineSettings(pipeline_depth=1))


def test_speculation_is_refused_without_packed_rows_and_without_followers_of_states(
    tiny_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_artifact.config
    files = (tiny_artifact.vmfb, tiny_artifact.parameters, NO_EOS, EngineSettings(speculative="ngram"))
    with closing(open_device()) as device:
        assert make_engine(device, config, *files).stats().speculation is not None
        assert make_engine(device, config, *files[:-1], EngineSettings()).stats().speculation is None
        cache = replace(config.paged_kv_cache, pools={"state": 1})
        monkeypatch.setattr(loading, "check_program", lambda *args: None)
        with pytest.raises(ArtifactError, match=r"states of the model.*`--speculative`.*rebuild"):
            make_engine(device, replace(config, paged_kv_cache=cache), *files)
        monkeypatch.setattr(Buckets, "has_packed_extend", False)
        with pytest.raises(ArtifactError, match=r"packed `extend`.*`--speculative`"):
            make_engine(device, config, *files)


def test_requests_in_progress_by_default_are_the_modes_own(tiny_artifact: Artifact) -> None:
    artifact = tiny_artifact
    files = (artifact.config, artifact.vmfb, artifact.parameters, NO_EOS)
    decode_rows = max(artifact.config.decode_batch_sizes)
    with closing(open_device()) as device:
        for options, expected in (
            (EngineSettings(), decode_rows),
            (EngineSettings(device="hip"), 256),
            (EngineSettings(batching=BatchSettings(batch_mode="extend-attention")), decode_rows),
            (EngineSettings(max_running=3), 3),
        ):
            assert make_engine(device, *files, options).max_running == expected


@pytest.mark.parametrize(
    ("options", "pages"),
    [
        (EngineSettings(pages=9), 9),
        (EngineSettings(pages="auto", max_running=1), CONTEXT_PAGES + 1),
        (EngineSettings(device="hip", max_running=2), 2 * CONTEXT_PAGES + 1),
    ],
)
def test_pages_are_those_given_or_what_there_is_memory_for(
    tiny_artifact: Artifact, options: EngineSettings, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = (tiny_artifact.config, tiny_artifact.vmfb, tiny_artifact.parameters, NO_EOS)
    with closing(open_device()) as device:
        monkeypatch.setattr(device, "spare_bytes", lambda stage: 1 << 30)
        assert make_engine(device, *files, options).stats().pages.total == pages - 1


def test_a_device_that_does_not_tell_its_memory_has_the_recorded_pages(
    tiny_artifact: Artifact, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorded = tiny_artifact.config.paged_kv_cache.device_block_count
    files = (tiny_artifact.config, tiny_artifact.vmfb, tiny_artifact.parameters, NO_EOS)
    with closing(open_device()) as device:
        monkeypatch.setattr(device, "spare_bytes", lambda stage: None)
        engine = make_engine(device, *files, EngineSettings(pages="auto"))
        assert engine.stats().pages.total == recorded - 1
    assert "--pages" in caplog.text


@pytest.mark.parametrize(
    ("options", "is_measured"),
    [
        (EngineSettings(), True),
        (EngineSettings(batching=BatchSettings(batch_mode="extend-attention")), True),
        (EngineSettings(batching=BatchSettings(batch_mode="default", chunk_tokens=64)), False),
        (EngineSettings(batching=BatchSettings(batch_mode="default", token_budget=64)), False),
    ],
)
async def test_the_least_budget_of_a_cpu_is_measured_unless_it_is_given(
    tiny_artifact: Artifact, options: EngineSettings, is_measured: bool, caplog: pytest.LogCaptureFixture
) -> None:
    artifact = tiny_artifact
    caplog.set_level("INFO")
    engine = load_engine(artifact.config, artifact.vmfb, artifact.parameters, NO_EOS, options, tunes=True)
    engine.start()
    await engine.close()
    assert ("of a light load's prompts" in caplog.text) == is_measured


def test_a_self_test_that_fails_closes_the_device_and_a_damaged_file_explains_it(
    tiny_artifact: Artifact,
) -> None:
    assert tiny_artifact.self_test is not None
    file = replace(SelfTestFile.load(tiny_artifact.self_test), tolerance=0.0)
    facts = ModelFacts(self_test=file)

    def load(confirm: Callable[[], None]) -> None:
        load_engine(
            tiny_artifact.config,
            tiny_artifact.vmfb,
            tiny_artifact.parameters,
            NO_EOS,
            EngineSettings(),
            facts,
            confirm,
        )

    def damaged() -> None:
        raise ArtifactError("the file differs")

    with pytest.raises(SelfTestError, match="`prefill_bs1` differs from the reference") as caught:
        load(lambda: None)
    Path(str(caught.value).partition("report written to ")[2].partition(";")[0]).unlink()
    with pytest.raises(ArtifactError, match="the file differs") as other:
        load(damaged)
    Path(str(other.value.__context__).partition("report written to ")[2].partition(";")[0]).unlink()


def test_a_self_test_that_passes_is_counted(tiny_artifact: Artifact) -> None:
    assert tiny_artifact.self_test is not None
    file = SelfTestFile.load(tiny_artifact.self_test)
    with closing(open_device()) as device:
        engine = make_engine(
            device,
            tiny_artifact.config,
            tiny_artifact.vmfb,
            tiny_artifact.parameters,
            NO_EOS,
            EngineSettings(),
            ModelFacts(self_test=file, same_bits=True),
        )
        stats = engine.stats()
    assert (stats.self_tests, stats.self_test_failures, stats.failed_self_test) == (1, 0, None)
    assert stats.pages.leased == 0
    assert not stats.entries
