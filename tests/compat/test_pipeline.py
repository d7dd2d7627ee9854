"""A program that upstream exported for two pipeline stages, on two CPU devices: a slab on each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.batching.mode import BatchSettings
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.invocation.page_count import page_table_bytes
from shortfin_apps.llm.components.kvcache import PrefixCache
from shortfin_apps.llm.components.runtime.device import Device, DeviceBuffer
from shortfin_apps.llm.components.runtime.open import Runtime, open_device
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from shortfin_apps.llm.serving.loading import make_engine
from tests.compat.test_toy_llama import LEAST_TOKENS, NEAR_TIE
from tests.compat.toy_llama import CASES, PIPELINE, stages_of, write_toy_llama
from tests.integration.generation import assert_same, generate
from tests.runtimes import RUNTIMES, needs_shortfin

pytestmark = pytest.mark.slow

NUM_STAGES = 2


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return write_toy_llama(PIPELINE, tmp_path_factory.mktemp(PIPELINE))


@contextmanager
def open_cpus(count: int) -> Iterator[Device]:
    """So many devices of shortfin that all are this CPU, each with a worker, an allocator and a queue."""
    import shortfin as sf

    from shortfin_apps.llm.components.runtime.shortfin_device import ShortfinDevice

    builder = sf.host.CPUSystemBuilder(
        env_prefix=None,
        hostcpu_allocators="caching",
        hostcpu_topology_nodes=",".join(["0"] * count),
        hostcpu_topology_max_group_count=1,
    )
    device = ShortfinDevice("hostcpu", builder.create_system())
    try:
        yield device
    finally:
        device.close()


def open_pipeline(device: Device, artifact: Artifact, options: EngineSettings) -> Engine:
    return make_engine(device, artifact.config, artifact.vmfb, artifact.parameters, frozenset(), options)


class Observed:
    """A device that keeps the slabs which were allocated on it, by stage."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.slabs: dict[int, DeviceBuffer] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def allocate(self, *arguments: Any, stage: int = 0, **options: Any) -> DeviceBuffer:
        buffer = self._device.allocate(*arguments, stage=stage, **options)
        if len(buffer.shape) == 2:  # not the token table
            self.slabs[stage] = buffer
        return buffer


@needs_shortfin
@pytest.mark.parametrize("prefix_cache", ["none", "trie"])
@pytest.mark.parametrize("chunk_tokens", [None, 32])
def test_tokens_equal_upstreams_alone_batched_and_repeated(
    chunk_tokens: int | None, prefix_cache: PrefixCache, pipeline: Artifact
) -> None:
    count = min(len(case.token_ids) for case in CASES)
    mode = BatchSettings(batch_mode="default", chunk_tokens=chunk_tokens)
    with open_cpus(NUM_STAGES) as device:
        engine = open_pipeline(device, pipeline, EngineSettings(prefix_cache=prefix_cache, batching=mode))
        for case in CASES:
            (alone,) = generate(engine, [case.prompt_token_ids], len(case.token_ids))
            assert assert_same(alone, case.token_ids, NEAR_TIE) >= LEAST_TOKENS
        for _ in range(2):
            together = generate(engine, [case.prompt_token_ids for case in CASES], count)
            for got, case in zip(together, CASES, strict=True):
                assert assert_same(got, case.token_ids[:count], NEAR_TIE) >= LEAST_TOKENS
        assert (engine.stats().cached_tokens > 0) == (prefix_cache == "trie")


@needs_shortfin
def test_each_slab_lies_on_its_stages_device_and_is_written_there(pipeline: Artifact) -> None:
    with open_cpus(NUM_STAGES) as device:
        observed = Observed(device)
        engine = open_pipeline(cast(Device, observed), pipeline, EngineSettings(prefix_cache="none"))
        names = [cast(Any, observed.slabs[stage]).array.device.raw_device.name for stage in range(NUM_STAGES)]
        assert len(set(names)) == NUM_STAGES
        slabs = [observed.slabs[stage] for stage in range(NUM_STAGES)]
        assert [slab.shape[1] for slab in slabs] == list(stages_of(PIPELINE))
        assert sum(slab.shape[0] * slab.shape[1] for slab in slabs) * 2 == page_table_bytes(
            pipeline.config, slabs[0].shape[0], 0
        )
        generate(engine, [CASES[-1].prompt_token_ids], 2)
        for slab in slabs:
            num_written = np.count_nonzero(device.download(slab)[1:].any(axis=1))
            assert num_written >= len(CASES[-1].prompt_token_ids) // pipeline.config.stride


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_one_device_is_too_few_and_the_message_says_what_to_do(runtime: Runtime, pipeline: Artifact) -> None:
    device = open_device("cpu", runtime)
    try:
        too_few = r"more devices than the 1 .*--device-ids.*--runtime shortfin"
        with pytest.raises(ArtifactError, match=too_few) as caught:
            open_pipeline(device, pipeline, EngineSettings())
        assert len(str(caught.value)) < 400
    finally:
        device.close()
