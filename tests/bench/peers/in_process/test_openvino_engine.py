from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.peers.in_process.arguments import Arguments
from bench.peers.in_process.openvino_engine import (
    OpenVinoEngine,
    device_properties,
    generation_config,
    scheduler_config,
)


class Handle:
    """A request of the pipeline below."""

    def __init__(self) -> None:
        self.unread: list[int] = []

    def can_read(self) -> bool:
        return bool(self.unread)

    def read(self) -> dict[int, Any]:
        taken, self.unread = self.unread, []
        return {0: SimpleNamespace(generated_ids=taken)}


class Pipeline:
    """Stands in for ContinuousBatchingPipeline: the request added last gets no token in the first step."""

    def __init__(self) -> None:
        self.added: list[tuple[int, Sequence[int], int]] = []
        self._handles: list[Handle] = []
        self._steps = 0

    def add_request(self, key: int, prompt: Sequence[int], config: int) -> Handle:
        self.added.append((key, prompt, config))
        self._handles.append(Handle())
        return self._handles[-1]

    def step(self) -> None:
        self._steps += 1
        for handle in self._handles[: 1 if self._steps == 1 else None]:
            handle.unread.append(self._steps)


def test_tokens_are_read_until_each_request_has_all() -> None:
    pipeline = Pipeline()
    engine = OpenVinoEngine(pipeline, tuple, lambda max_tokens: max_tokens)
    engine.add(4, [1, 2], 1)
    engine.add(5, [3], 2)
    assert pipeline.added == [(4, (1, 2), 1), (5, (3,), 2)]
    assert engine.step() == [(4, 1)]
    assert engine.is_busy()
    assert engine.step() == [(5, 2)]
    assert engine.step() == [(5, 3)]
    assert not engine.is_busy()


def test_its_settings_cache_prefixes_bound_threads_and_ignore_the_end() -> None:
    config = scheduler_config(SimpleNamespace(SchedulerConfig=SimpleNamespace))
    assert config.enable_prefix_caching
    answer = generation_config(SimpleNamespace(GenerationConfig=SimpleNamespace), 7)
    assert (answer.max_new_tokens, answer.ignore_eos, answer.do_sample) == (7, True, False)
    assert device_properties(Arguments(Path(), 0, 2, None)) == {"INFERENCE_NUM_THREADS": 2}
    assert device_properties(Arguments(Path(), 0, 2, "bf16"))["INFERENCE_PRECISION_HINT"] == "bf16"
