"""Speculation on a model with states: the same answers as without, to the bit.

Its random weights repeat nothing, so the known answers are proposed (known_answers.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.builder.builder import build
from shortfin_apps.llm.builder.progress import QuietProgress
from shortfin_apps.llm.components.batching.mode import BatchSettings
from shortfin_apps.llm.components.engine import speculation
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.runtime.open import Runtime
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from tests.integration.byte_models import write_byte_model
from tests.integration.generation import open_engine
from tests.integration.known_answers import check, proposing, told
from tests.integration.test_speculation import MODES, Answer, answers, calls
from tests.runtimes import RUNTIMES

pytestmark = pytest.mark.slow

STRIDE = 16
SIZES = (1, 4, 8)
OPTIONS = BuildOptions(
    context_length=256,
    prefill_batch_sizes=(1, 2),
    decode_batch_sizes=SIZES,
    decode_loop_sizes=SIZES,
    extend_sizes=(32,),
    block_seq_stride=STRIDE,
    top_k=8,
)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("hybrid")
    source = write_byte_model("qwen35", folder / "source")
    return build(str(source), folder / "artefact", OPTIONS, QuietProgress())


class KnownAnswers:
    """Takes the place of a PromptLookup: proposes what follows in one of `texts`, but for one wrong token."""

    texts: Sequence[Sequence[int]] = ()

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens or 1

    def num_worth(self, token_ids: Sequence[int], least: float, most: int) -> int:
        return len(self.propose(token_ids, least, most))

    def propose(self, token_ids: Sequence[int], least: float, most: int) -> list[int]:
        count = max(0, min(most, 1 + len(token_ids) % self._max_tokens))
        proposed = [told(self.texts, token_ids, number) for number in range(count)]
        return [each for each in proposed if each is not None]

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        pass


@contextmanager
def speculating(artifact: Artifact, texts: Sequence[Sequence[int]], **options: Any) -> Iterator[Engine]:
    """An engine to which `texts` (prompts with answers) are proposed; some are accepted, some rejected."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculation, "PromptLookup", KnownAnswers)
        patch.setattr(KnownAnswers, "texts", texts)
        with proposing(artifact, EngineSettings(speculative="ngram", **options)) as engine:
            yield engine


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("mode", MODES, ids=["default", "extend"])
def test_answers_are_those_without(artifact: Artifact, runtime: Runtime, mode: BatchSettings) -> None:
    check(artifact, speculating, runtime=runtime, batching=mode)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("mode", MODES, ids=["default", "extend"])
def test_answers_are_those_without_where_requests_are_preempted(
    artifact: Artifact, mode: BatchSettings, depth: int
) -> None:
    check(artifact, speculating, runtime="iree", batching=mode, pages=20, pipeline_depth=depth)


@pytest.mark.parametrize("mode", MODES, ids=["default", "extend"])
def test_nan_in_pages_of_states_is_not_read_by_those_who_get_them(
    artifact: Artifact, mode: BatchSettings
) -> None:
    """As if the states of rejected tokens were NaN: in all pages, with tokens drawn by the device."""
    options: dict[str, Any] = {"runtime": "iree", "batching": mode, "pipeline_depth": 1}
    asked = [
        GenerateCall(
            request_id=each.request_id,
            prompt_token_ids=each.prompt_token_ids,
            params=replace(each.params, logprobs=None),
        )
        for each in calls(40)
    ]
    with open_engine(artifact, EngineSettings(**options)) as engine:
        expected = answers(engine, asked)
    texts = [[*each.prompt_token_ids, *tokens] for each, (tokens, _) in zip(asked, expected, strict=True)]
    with speculating(artifact, texts, **options) as engine:
        runner = engine._runner
        [_, states] = runner._page_table
        for _ in range(2):
            nan = np.full(states.shape[0] * states.shape[1] * states.dtype.itemsize, 0xFF, np.uint8)
            pages = nan.view(states.dtype).reshape(states.shape)
            runner._page_table[1] = runner._device.upload(pages)
            assert answers(engine, asked) == expected
            engine.flush_cache()


def answer(engine: Engine, prompt: list[int], count: int, **params: Any) -> Answer:
    sampling = SamplingParams(max_tokens=count, logprobs=2, **params)
    engine.add(GenerateCall(request_id="a", prompt_token_ids=tuple(prompt), params=sampling))
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    assert all(delta.error is None for delta in deltas)
    tokens = tuple(token for delta in deltas for token in delta.token_ids)
    return tokens, tuple(each for delta in deltas for each in delta.logprobs)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.5, "seed": 3}], ids=str)
@pytest.mark.parametrize("mode", MODES, ids=["default", "extend"])
def test_answers_after_cached_pages_at_every_offset(
    artifact: Artifact, mode: BatchSettings, params: dict[str, Any]
) -> None:
    """Prompts that end at each slot of a page, then the same with the answer and more: from cached pages."""
    text, count = np.random.default_rng(5).integers(0, 256, 4 * STRIDE).tolist(), STRIDE + 3
    turns: list[tuple[list[int], Answer]] = []
    with open_engine(artifact, EngineSettings(runtime="iree", prefix_cache="none", batching=mode)) as engine:
        for length in range(STRIDE, 2 * STRIDE + 3):
            prompt = text[:length]
            more: list[int]
            for more in ([], text[length:]):
                prompt = [*prompt, *more]
                turns.append((prompt, answer(engine, prompt, count, **params)))
                prompt = [*prompt, *turns[-1][1][0]]
    texts = [[*prompt, *tokens] for prompt, (tokens, _) in turns]
    with speculating(artifact, texts, runtime="iree", batching=mode) as engine:
        for prompt, expected in turns:
            assert answer(engine, prompt, count, **params) == expected, len(prompt)
        cached = engine.stats().cached_tokens
    assert cached >= sum((len(prompt) + count - 1) // STRIDE * STRIDE for prompt, _ in turns[::2])
