"""With `chosen_logits`, each token comes with its logit, and tokens are what they are without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.components.speculation.options import SpeculationOptions
from tests.components.engine_fixture import PROMPT, Rig, call, make_rig
from tests.components.fake_device import fake_config, greedy_continuation
from tests.components.forcing_grammar import Keys

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.5, "top_k": 3, "top_p": 0.9},
    {"temperature": 1.0, "logit_bias": ((3, 5.0), (4, -2.0))},
    {"temperature": 0.0, "bad_words": ((5,), (7, 8)), "frequency_penalty": 1.0},
    {"temperature": 0.0, "output_grammar": Keys()},
    {"temperature": 0.8, "min_tokens": 3, "allowed_token_ids": frozenset(range(3, 30))},
]
DRAWS: dict[str, Any] = {
    "loop_sizes": (1, 2, 4, 8),
    "sample_sizes": (1, 2, 4, 8),
    "adjusted_sample_sizes": (1, 2, 4, 8),
}
PLACES: list[dict[str, Any]] = [
    {},
    {"loop_sizes": (1, 2, 4, 8)},
    {"loop_sizes": (1, 2, 4, 8), "sample_sizes": (1, 2, 4, 8)},
    {"sample_sizes": (1, 2, 4, 8), "adjusted_sample_sizes": (1, 2, 4, 8)},
    {"loop_sizes": (1, 2, 4, 8), "logprob_sizes": (1, 8), "depth": 2},
    {**DRAWS, "logprob_sizes": (1, 8)},
    {**DRAWS, "logprob_sizes": (3,), "depth": 2, "mode": "extend-attention"},
    {**DRAWS, "logprob_sizes": (3,), "prefix_cache": "none", "config": fake_config(pages=20)},
    {"speculation": SpeculationOptions(max_tokens=4, row_cost=0)},
    {"mode": "extend-attention"},
    {"config": fake_config(top_k=None, pages=64)},
    {"prefix_cache": "none", "config": fake_config(pages=20)},
]
Logits = dict[str, list[float]]


def calls() -> list[GenerateCall]:
    return [call(str(i), PROMPT[i:], 9, seed=i, **kind) for i, kind in enumerate(KINDS)]


def asking(made: GenerateCall) -> GenerateCall:
    return replace(made, params=replace(made.params, chosen_logits=True))


def logits_of(made: Rig) -> Logits:
    """Runs it; those of every request, in order."""
    found: Logits = {}
    while made.engine.has_work:
        deltas = made.engine.step()
        for delta in deltas:
            assert len(delta.logits) in (0, len(delta.token_ids))
            found.setdefault(delta.request_id, []).extend(each.logit for each in delta.logits)
        made.take(deltas)
    return found


def output(several: list[GenerateCall], **options: Any) -> tuple[dict[str, list[int]], Logits]:
    made = make_rig(**{"config": fake_config(pages=64), **options})
    for each in several:
        made.engine.add(each)
    logits = logits_of(made)
    assert made.all_pages_back()
    return made.outputs, logits


def alone() -> tuple[dict[str, list[int]], Logits]:
    """Each request alone, on a model that returns whole rows."""
    tokens: dict[str, list[int]] = {}
    logits: Logits = {}
    for each in calls():
        of_one = output([asking(each)], config=fake_config(top_k=None, pages=64))
        tokens |= of_one[0]
        logits |= of_one[1]
    return tokens, logits


ALONE = alone()


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_tokens_and_logits_are_those_of_each_request_alone(place: dict[str, Any]) -> None:
    assert output([asking(each) for each in calls()], **place) == ALONE


@given(st.lists(st.booleans(), min_size=len(KINDS), max_size=len(KINDS)), st.sampled_from(PLACES))
def test_only_those_that_ask_get_logits_and_nobody_other_tokens(
    ask: list[bool], place: dict[str, Any]
) -> None:
    several = [asking(each) if asks else each for each, asks in zip(calls(), ask, strict=True)]
    tokens, logits = output(several, **place)
    assert tokens == ALONE[0]
    expected = {name: ALONE[1][name] if asks else [] for name, asks in zip(ALONE[1], ask, strict=True)}
    assert logits == expected


def test_nothing_is_queued_before_the_host_has_read_the_logits() -> None:
    made = make_rig(fake_config(pages=64), loop_sizes=(1, 2, 4, 8))
    made.engine.add(asking(call("0", PROMPT[:5])))
    made.run()
    assert made.engine.stats().steps_ahead == 0


def test_the_entry_family_is_that_of_the_row() -> None:
    families = {}
    for mode in ("default", "extend-attention"):
        made = make_rig(fake_config(pages=64), mode=mode)
        made.engine.add(asking(call("0", PROMPT)))
        families[mode] = [
            each.entry_family for _ in range(9) for delta in made.engine.step() for each in delta.logits
        ]
    assert families == {"default": ["prefill", *["decode"] * 3], "extend-attention": ["extend"] * 4}


def test_preempting_changes_nothing() -> None:
    made = make_rig(fake_config(pages=64))
    for each in calls():
        made.engine.add(asking(each))
    logits: Logits = {}
    while made.engine.has_work:
        deltas = made.engine.step()
        made.take(deltas)
        for delta in deltas:
            logits.setdefault(delta.request_id, []).extend(each.logit for each in delta.logits)
            if len(made.outputs[delta.request_id]) in (1, 4):
                assert made.engine.preempt(delta.request_id)
                made.cache.check_integrity()
    assert (made.outputs, logits) == ALONE
    assert made.engine.stats().preemptions == 2 * len(KINDS)


def test_only_a_running_request_is_preempted() -> None:
    made = make_rig(loop_sizes=(1, 2, 4, 8))
    assert not made.engine.preempt("0")
    made.engine.add(call("0", PROMPT, 9))
    assert not made.engine.preempt("0")
    while len(made.outputs.get("0", [])) < 2:
        made.step()
    assert made.program.in_flight
    assert made.engine.preempt("0"), "after the step in flight"
    made.run()
    assert made.outputs["0"] == greedy_continuation(PROMPT, 9)
