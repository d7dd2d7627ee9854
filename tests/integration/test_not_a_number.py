"""A token with a NaN embedding, in a real model: it only ends the requests that contain it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.builder.sources.base import Array
from shortfin_apps.llm.builder.sources.random_tiny import RandomTinySource
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.builder.weights.write import write_weights
from shortfin_apps.llm.components.batching.mode import BatchSettings
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.request.messages import Delta, FinishReason, GenerateCall
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.runtime.open import open_device
from shortfin_apps.llm.contract.errors import InvocationError
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from shortfin_apps.llm.serving.loading import make_engine
from tests.conftest import TINY_OPTIONS, BuildTiny
from tests.runtimes import needs_shortfin

pytestmark = pytest.mark.slow

PADDING, BAD, INFINITE = 0, 251, 252
LENGTHS = (1, 17, 40, 70, 130)
MAX_TOKENS = 12
PAGES = 64  # few enough that new requests get the pages of ended ones
MOST_STEPS = 2_000

Tokens = tuple[int, ...]


class SpoiledSource(RandomTinySource):
    """`random:tiny` with other values in the embeddings of some tokens."""

    def __init__(self, rows: Mapping[int, float]) -> None:
        super().__init__()
        self._rows = rows

    def tensor(self, name: str) -> Array:
        values = super().tensor(name)
        if name == "token_embd.weight":
            for token, number in self._rows.items():
                values[token] = number
        return values


@dataclass(frozen=True)
class Answer:
    tokens: Tokens
    logprobs: tuple[float, ...]
    error: bool


def spoil(artifact: Artifact, folder: Path, rows: Mapping[int, float]) -> Artifact:
    path = folder / "model.irpa"
    write_weights(SpoiledSource(rows), TINY_OPTIONS, resolve_target("cpu"), path, lambda count: None)
    return replace(artifact, parameters=(path,))


def serve(engine: Engine, requests: Sequence[tuple[int, Tokens]]) -> list[Answer]:
    """Answers `requests` greedily; each is a prompt and the step before which it is submitted."""
    deltas: dict[str, list[Delta]] = {str(index): [] for index in range(len(requests))}
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, logprobs=1, ignore_eos=True)
    for step in range(MOST_STEPS):
        for index, (due, prompt) in enumerate(requests):
            if due == step:
                engine.add(GenerateCall(request_id=str(index), prompt_token_ids=prompt, params=params))
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
        if step >= max(due for due, _ in requests) and not engine.has_work:
            return [answer_of(each) for each in deltas.values()]
    raise AssertionError("the engine makes no progress")


def answer_of(deltas: Sequence[Delta]) -> Answer:
    last = deltas[-1]
    if last.finish_reason is FinishReason.ERROR:
        assert isinstance(last.error, InvocationError)
    else:
        assert last.finish_reason is FinishReason.LENGTH
    return Answer(
        tuple(token for delta in deltas for token in delta.token_ids),
        tuple(entry.logprob for delta in deltas for entry in delta.logprobs),
        last.finish_reason is FinishReason.ERROR,
    )


def open_and_serve(
    artifact: Artifact, options: EngineSettings, *rounds: Sequence[tuple[int, Tokens]]
) -> list[list[Answer]]:
    device = open_device(options.device, options.runtime)
    try:
        engine = make_engine(
            device, artifact.config, artifact.vmfb, artifact.parameters, frozenset(), options
        )
        answers = [serve(engine, requests) for requests in rounds]
        assert engine.stats().pages.leased == 0
        assert engine.stats().preemptions == 0, "recomputed tokens may differ in their last bits"
        return answers
    finally:
        device.close()


@pytest.fixture(scope="module")
def prompts() -> list[Tokens]:
    random = np.random.default_rng(13)
    return [tuple(random.integers(128, 250, n).tolist()) for n in LENGTHS]


@pytest.fixture(scope="module")
def alone(tiny_artifact: Artifact, prompts: Sequence[Tokens]) -> list[Answer]:
    """The answer to each prompt without any other request."""
    options = EngineSettings(runtime="iree", prefix_cache="none")
    rounds = [[(0, prompt)] for prompt in prompts]
    return [answer for [answer] in open_and_serve(tiny_artifact, options, *rounds)]


@pytest.fixture(
    params=[
        pytest.param(case, id="-".join(case), marks=[needs_shortfin] if case[0] == "shortfin" else [])
        for case in itertools.product(["iree", "shortfin"], ["none", "trie"], ["default", "extend-attention"])
    ]
)
def options(request: pytest.FixtureRequest) -> EngineSettings:
    runtime, prefix_cache, mode = request.param
    return EngineSettings(
        runtime=runtime,
        batching=BatchSettings(batch_mode=mode, chunk_tokens=64),
        prefix_cache=prefix_cache,
        pages=PAGES,
    )


def test_a_prompt_with_nan_fails_alone(
    tiny_artifact: Artifact,
    prompts: Sequence[Tokens],
    alone: Sequence[Answer],
    tmp_path: Path,
    options: EngineSettings,
) -> None:
    """With the bad token first, in the middle and last, in the first chunk and later ones.

    Served twice: its pages are not in the cache, and the next requests on them get the same answers.
    Padding is NaN, too.
    """
    spoiled = spoil(tiny_artifact, tmp_path, {PADDING: np.nan, BAD: np.nan, INFINITE: np.inf})
    longest = prompts[-1]
    bad = [
        (BAD, *longest[1:]),
        (*longest[:66], INFINITE, *longest[67:]),
        (*longest[:-1], BAD),
        (BAD,),
        (*prompts[1], BAD),
    ]
    good = [(2 * index, prompt) for index, prompt in enumerate(prompts)]
    requests = [*good, *((3 * index, prompt) for index, prompt in enumerate(bad))]
    for answers in open_and_serve(spoiled, options, requests, requests):
        assert answers[: len(good)] == alone
        assert answers[len(good) :] == [Answer((), (), error=True)] * len(bad)


def test_a_prompt_with_nan_fails_alone_with_keys_and_values_in_bytes(
    build_tiny: BuildTiny, prompts: Sequence[Tokens], tmp_path: Path
) -> None:
    """Bytes have no NaN: the scales of the token's heads have it, and its pages are zeroed as others are."""
    artifact = build_tiny(replace(TINY_OPTIONS, kv="q8_0"))
    options = EngineSettings(runtime="iree", pages=PAGES)
    good = [(2 * index, prompt) for index, prompt in enumerate(prompts)]
    [expected] = open_and_serve(artifact, options, good)
    bad = [(1, (*prompts[-1][:66], BAD, *prompts[-1][67:])), (3, (BAD,))]
    spoiled = spoil(artifact, tmp_path, {PADDING: np.nan, BAD: np.nan})
    for answers in open_and_serve(spoiled, options, [*good, *bad], [*good, *bad]):
        assert answers == [*expected, *[Answer((), (), error=True)] * len(bad)]


def test_nan_in_a_decode_ends_that_request(
    tiny_artifact: Artifact,
    prompts: Sequence[Tokens],
    alone: Sequence[Answer],
    tmp_path: Path,
    options: EngineSettings,
) -> None:
    """The bad token is one that only a single request generates."""
    victim, place = next(
        (index, place)
        for index, answer in enumerate(alone)
        for place, token in enumerate(answer.tokens[:-1])
        if place > 1 and sum(other.tokens.count(token) for other in alone) == 1
    )
    spoiled = spoil(tiny_artifact, tmp_path, {alone[victim].tokens[place]: np.nan})
    requests = [(0, prompt) for prompt in prompts]
    for answers in open_and_serve(spoiled, options, requests, requests):
        for index, (answer, undisturbed) in enumerate(zip(answers, alone, strict=True)):
            if index == victim:
                kept = place + 1
                expected = Answer(undisturbed.tokens[:kept], undisturbed.logprobs[:kept], error=True)
                assert answer == expected
            else:
                assert answer == undisturbed
