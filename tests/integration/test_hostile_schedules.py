"""Adversarial schedules with few pages, on a compiled model in both modes.

Requests are aborted and time out at any moment, the cache is flushed, invocations fail before and after
execution, and pages in use turn to NaN. All tokens must equal those of the prompt alone, and a request may
fail only if one of these faults affected it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import cast

import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.batching.batch import Batch
from shortfin_apps.llm.components.batching.mode import BatchModeName, BatchSettings
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.invocation.launch import Launch
from shortfin_apps.llm.components.invocation.loop_state import Fields
from shortfin_apps.llm.components.request.messages import Delta, FinishReason, GenerateCall, Terms
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.runtime.device import Array
from shortfin_apps.llm.components.runtime.iree_local import LocalBuffer
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from tests.components.stepped_engine import SteppedClock
from tests.integration.generation import Continuation, generate, open_engine

pytestmark = pytest.mark.slow

SEEDS = range(16)
TOLERANCE = 0.02  # as in test_same_tokens.py, for what was preempted
LENGTHS = (1, 15, 16, 17, 33, 64, 100, 150)
MAX_TOKENS = 48
MOST_STEPS = 5_000
NAN_BYTE = 0xFF

Prompt = tuple[int, ...]


@pytest.fixture(scope="module")
def alone(tiny_artifact: Artifact) -> dict[Prompt, Continuation]:
    """Prompts, many with a common prefix, and the continuation of each when it runs alone."""
    rng = random.Random(17)
    stems = [[rng.randrange(128, 250) for _ in range(max(LENGTHS))] for _ in range(2)]
    prompts = [(*stem[:length], rng.randrange(128, 250)) for stem in stems for length in LENGTHS]
    with open_engine(tiny_artifact, EngineSettings(runtime="iree", prefix_cache="none")) as engine:
        return {prompt: generate(engine, [prompt], MAX_TOKENS)[0] for prompt in prompts}


class Schedule:
    def __init__(self, engine: Engine, rng: random.Random, alone: dict[Prompt, Continuation]) -> None:
        self._engine, self._rng, self._alone = engine, rng, alone
        self._clock = engine._clock = SteppedClock()
        self._fault_rate = rng.choice([0.0, 0.02, 0.1])
        self._launch = engine._runner.launch
        engine._runner.launch = self._launch_or_fail  # type: ignore[method-assign]
        self._bad_pages: set[int] = set()
        self._hit: set[str] = set()
        self._asked: dict[str, GenerateCall] = {}
        self._tokens: dict[str, list[int]] = {}
        self._last: dict[str, Delta] = {}

    def run(self) -> None:
        for _ in range(self._rng.randint(30, 100)):
            for _ in range(self._rng.choice([0, 0, 0, 1, 3])):
                self._arrive()
            self._meddle()
            self._step()
        self._fault_rate = 0.0
        for _ in range(MOST_STEPS):
            if not self._engine.has_work:
                return
            self._step()
        raise AssertionError("the engine makes no progress")

    def check(self) -> None:
        assert self._last.keys() == self._asked.keys()
        for request_id, call in self._asked.items():
            reason, tokens = self._last[request_id].finish_reason, self._tokens[request_id]
            assert reason is not FinishReason.ERROR or request_id in self._hit
            assert reason is not FinishReason.LENGTH or len(tokens) == call.params.max_tokens
            self._compare(self._alone[call.prompt_token_ids], tokens)
        self._engine.flush_cache()
        pages = self._engine.stats().pages
        assert pages.free == pages.total

    def _compare(self, expected: Continuation, tokens: Sequence[int]) -> None:
        pairs = zip(expected.token_ids, tokens, expected.gaps, strict=False)
        for want, have, gap in pairs:
            if want != have:
                assert self._engine.stats().preemptions
                assert gap < TOLERANCE
                return

    def _arrive(self) -> None:
        request_id = str(len(self._asked))
        call = GenerateCall(
            request_id=request_id,
            prompt_token_ids=self._rng.choice(list(self._alone)),
            params=SamplingParams(max_tokens=self._rng.choice([1, 5, 20, MAX_TOKENS]), temperature=0),
            terms=Terms(timeout_s=self._rng.choice([None] * 6 + [0.0, 3.0, 20.0])),
            cache_salt=self._rng.choice([None, None, None, "salt"]),
        )
        self._engine.check(call)
        self._engine.add(call)
        self._asked[request_id], self._tokens[request_id] = call, []

    def _meddle(self) -> None:
        if self._asked and self._rng.random() < 0.15:
            delta = self._engine.abort(self._rng.choice(list(self._asked)))
            self._take([] if delta is None else [delta])
        if self._rng.random() < 0.05:
            self._engine.flush_cache()

    def _step(self) -> None:
        self._clock.now_s += 1
        self._take(self._engine.step())
        # Pages that were zeroed or overwritten are good again; only values that are still NaN are bad.
        self._bad_pages = {page for page in self._bad_pages if (self._pages[page] == NAN_BYTE).any()}

    def _take(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            assert delta.request_id not in self._last, "a request was answered twice"
            self._tokens[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                self._last[delta.request_id] = delta
        self._engine._cache.check_integrity()

    @property
    def _pages(self) -> Array:
        """[pages, bytes], writable."""
        [slab] = self._engine._runner._page_table
        return cast(LocalBuffer, slab).map_bytes().reshape(slab.shape[0], -1)

    def _launch_or_fail(
        self, batch: Batch, fields: Fields | None = None, slots: Sequence[int] | None = None
    ) -> Launch:
        fault = None
        if self._rng.random() < self._fault_rate:
            fault = self._rng.choice(["before", "after", "nan"])
        if fault == "nan":
            page = self._rng.choice(self._rng.choice(batch.tasks).page_ids)
            quarter = self._pages.shape[1] // 4  # K or V of one of two layers
            begin = self._rng.randrange(4) * quarter
            self._pages[page, begin : begin + quarter] = NAN_BYTE
            self._bad_pages.add(page)
        for task in batch.tasks:
            if fault in ("before", "after") or not self._bad_pages.isdisjoint(task.page_ids):
                self._hit.add(task.request.request_id)
        if fault == "before":
            raise RuntimeError("broken before it ran")
        launch = self._launch(batch, fields, slots)
        if fault == "after":
            launch.pending.wait()
            raise RuntimeError("broken after it ran")
        return launch


@pytest.mark.parametrize("mode", ["default", "extend-attention"])
@pytest.mark.parametrize("seed", SEEDS)
def test_no_schedule_changes_anothers_answer(
    tiny_artifact: Artifact, alone: dict[Prompt, Continuation], mode: BatchModeName, seed: int
) -> None:
    rng = random.Random(seed)
    options = EngineSettings(
        runtime="iree",
        pages=rng.choice([16, 18, 24, 40]),
        prefix_cache=rng.choice(["none", "trie", "trie"]),
        batching=BatchSettings(
            batch_mode=mode,
            chunk_tokens=rng.choice([None, 16, 48, 128]),
            token_budget=rng.choice([None, 32, 64, 256]),
        ),
        max_running=rng.choice([2, 4, 8, 16]),
    )
    with open_engine(tiny_artifact, options) as engine:
        schedule = Schedule(engine, rng, alone)
        schedule.run()
        schedule.check()
