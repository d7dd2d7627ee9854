"""Runs real artefacts on the engine, step by step, and compares their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.runtime.open import open_device
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from shortfin_apps.llm.serving.loading import NO_FACTS, ModelFacts, make_engine


@dataclass(frozen=True)
class Continuation:
    """Greedy tokens and, for each, the gap between the best and the second logit."""

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]


@contextmanager
def open_engine(
    artifact: Artifact, options: EngineSettings, facts: ModelFacts = NO_FACTS
) -> Iterator[Engine]:
    device = open_device(options.device, options.runtime, threads=options.threads)
    try:
        yield make_engine(
            device, artifact.config, artifact.vmfb, artifact.parameters, frozenset(), options, facts
        )
    finally:
        device.close()


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    arrivals: Sequence[int] | None = None,
) -> list[Continuation]:
    """Greedy continuations; prompt i joins before step `arrivals[i]`, or before the first."""
    tokens: dict[str, list[int]] = {}
    gaps: dict[str, list[float]] = {}
    params = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=2)
    due = arrivals or [0] * len(prompts)
    for index in range(len(prompts)):
        tokens[str(index)], gaps[str(index)] = [], []
    for step in count():
        for index, prompt in enumerate(prompts):
            if due[index] == step:
                engine.add(GenerateCall(request_id=str(index), prompt_token_ids=tuple(prompt), params=params))
        if step > max(due) and not engine.has_work:
            break
        for delta in engine.step():
            assert delta.error is None, delta.error
            tokens[delta.request_id] += delta.token_ids
            gaps[delta.request_id] += [entry.top[0][1] - entry.top[1][1] for entry in delta.logprobs]
    return [Continuation(tuple(tokens[i]), tuple(gaps[i])) for i in tokens]


def assert_all_same(
    expected: Sequence[Continuation], got: Sequence[Continuation], tolerance: float, max_tokens: int
) -> None:
    """`assert_same` of each, by which more than half of all `max_tokens` of each are compared."""
    compared = [assert_same(e, g.token_ids, tolerance) for e, g in zip(expected, got, strict=True)]
    assert sum(compared) > len(expected) * max_tokens / 2, "near ties ended almost every comparison"


def assert_same(expected: Continuation, got: Sequence[int], tolerance: float) -> int:
    """Asserts equal tokens, up to the first where `expected`'s two best logits are within `tolerance`.

    Returns how many tokens were compared.
    """
    for index, (want, have, gap) in enumerate(zip(expected.token_ids, got, expected.gaps, strict=False)):
        if want != have:
            assert gap < tolerance, f"token {index} is {have}, not {want}, and the gap was {gap}"
            return index
    assert len(got) == len(expected.token_ids)
    return len(got)
