"""Requests with penalties are queued ahead, with counts that the device keeps, and get the host's tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shortfin_apps.llm.components.request.messages import FinishReason, GenerateCall
from shortfin_apps.llm.components.speculation.options import SpeculationOptions
from shortfin_apps.llm.contract.errors import InvocationError
from tests.components.engine.test_pipeline import run_to_steady
from tests.components.engine.test_row_draws import invoked, outputs
from tests.components.engine_fixture import PROMPT, Rig, call, make_rig
from tests.components.fake_device import VOCAB, array_of, fake_config
from tests.components.forcing_grammar import Keys

SIZES: dict[str, Any] = {
    "loop_sizes": (1, 2, 4, 8),
    "sample_sizes": (2, 8),
    "adjusted_sample_sizes": (1, 2),  # fewer rows than a batch, so a step takes several launches
    "logprob_sizes": (8,),
}
KINDS: list[dict[str, Any]] = [
    {"presence_penalty": 0.5, "temperature": 1.0},
    {"frequency_penalty": 0.3, "repetition_penalty": 1.2, "temperature": 0.0},
    {"repetition_penalty": 0.8, "logit_bias": ((3, 2.0), (9, -4.0)), "temperature": 1.0},
    {"allowed_token_ids": frozenset(range(4, 30)), "presence_penalty": 0.7, "temperature": 0.7},
    {"bad_words": ((4,), (5,)), "temperature": 0.0},
    {"temperature": 1.0},
]
LATE: list[dict[str, Any]] = [
    {"bad_words": ((4,), (3, 8)), "frequency_penalty": 0.4, "temperature": 0.8},
    {"output_grammar": Keys(), "presence_penalty": 0.6, "temperature": 1.0},
]


def calls(kinds: list[dict[str, Any]], tokens: int = 16, **params: Any) -> list[GenerateCall]:
    return [call(str(i), PROMPT[i % 3 :], tokens, seed=i, **kind, **params) for i, kind in enumerate(kinds)]


def counts_of(rig: Rig) -> np.ndarray[Any, Any]:
    return array_of(rig.runner.slots.buffers["counts"])


@pytest.mark.parametrize("mode", ["default", "extend-attention"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_steady_decode_uploads_nothing_and_is_queued_ahead(mode: str, depth: int) -> None:
    config = fake_config(stride=64, max_seq_len=64, pages=16)
    rig = make_rig(config, mode=mode, token_budget=128, depth=depth, **SIZES)
    run_to_steady(rig, *calls(KINDS, 30))
    uploads, stats, adjusted = rig.device.uploads, rig.engine.stats(), invoked(rig, "adjusted_sample")
    for _ in range(10):
        rig.step()
    assert rig.device.uploads == uploads
    assert rig.engine.stats().steps_ahead == stats.steps_ahead + 10
    assert invoked(rig, "adjusted_sample") == adjusted + 10 * 3, "5 rows by 2"
    rig.run()
    assert rig.outputs == outputs(make_rig(config), calls(KINDS, 30))


@pytest.mark.parametrize("mode", ["default", "extend-attention"])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("pages", [13, 64], ids=["preempted", "roomy"])
def test_tokens_are_those_of_the_host(mode: str, depth: int, pages: int) -> None:
    """Also of rows that are drawn late, and of counts that the host gives anew after forced tokens."""
    asked = calls([*KINDS, *LATE])
    expected = outputs(make_rig(fake_config(pages=64)), asked)
    rig = make_rig(fake_config(pages=pages), mode=mode, depth=depth, **SIZES)
    assert outputs(rig, asked) == expected
    assert invoked(rig, "adjusted_sample")
    assert (rig.engine.stats().preemptions > 0) is (pages == 13)


@pytest.mark.parametrize("mode", ["default", "extend-attention"])
def test_a_slot_has_the_counts_of_its_last_request(mode: str) -> None:
    asked = calls([KINDS[0]] * 4, 9)
    rig = make_rig(mode=mode, max_running=1, **SIZES)
    assert outputs(rig, asked) == outputs(make_rig(), asked)
    counts = counts_of(rig)[0]
    assert [max(count, 0) for count in counts] == np.bincount(rig.outputs["3"], minlength=VOCAB).tolist()


def test_a_token_of_an_ended_request_is_not_counted_for_the_next_one() -> None:
    """It is drawn by the step in flight when the request ends."""
    rig = make_rig(max_running=1, depth=2, **SIZES)
    first, second = calls([KINDS[1]] * 2, 12)
    run_to_steady(rig, first)
    delta = rig.engine.abort("0")
    assert delta is not None
    rig.take([delta])
    rig.engine.add(second)
    rig.run()
    assert rig.engine.stats().discarded_tokens > 0
    assert rig.outputs["1"] == outputs(make_rig(), [second])["1"]


def test_tokens_that_the_host_accepts_after_proposals_are_counted() -> None:
    kinds: list[dict[str, Any]] = [{"presence_penalty": -1.0}, {"frequency_penalty": -0.5}, {}]
    asked = calls(kinds, 40, temperature=0.0)
    speculation = SpeculationOptions(max_tokens=4, row_cost=0)
    rig = make_rig(fake_config(pages=64), repeats=0.8, speculation=speculation, **SIZES)
    assert outputs(rig, asked) == outputs(make_rig(fake_config(pages=64), repeats=0.8), asked)
    stats = rig.engine.stats()
    assert stats.speculation is not None
    assert stats.speculation.accepted > 0
    assert stats.steps_ahead > 0


def test_draws_that_store_nothing_count_nothing() -> None:
    rig = make_rig(depth=0, **SIZES)
    before = counts_of(rig).copy()
    outputs(rig, calls(KINDS[:3]))
    assert invoked(rig, "adjusted_sample")
    np.testing.assert_array_equal(counts_of(rig), before)


@pytest.mark.parametrize("family", ["decode_loop", "adjusted_sample"])
def test_requests_go_on_with_right_counts_after_a_failure(family: str) -> None:
    """The failed step ends its requests; others start again from the tokens that are known."""
    rig = make_rig(mode="extend-attention", depth=2, **SIZES)
    asked = calls(KINDS[:3], 20)
    run_to_steady(rig, *asked[:2])

    def fail(entry: str) -> None:
        if entry.startswith(family):
            rig.program.faults.before = lambda entry: None
            raise InvocationError("broken")

    rig.engine.add(asked[2])
    rig.program.faults.before = fail
    rig.run()
    expected = outputs(make_rig(), asked)
    assert FinishReason.ERROR in {delta.finish_reason for delta in rig.last.values()}
    for name, tokens in rig.outputs.items():
        assert tokens == expected[name][: len(tokens)]
        assert rig.reason(name) is FinishReason.ERROR or tokens == expected[name]
    [last] = calls([{"frequency_penalty": 1.0}], 9)
    after = outputs(rig, [replace(last, request_id="after")])
    assert after["after"] == outputs(make_rig(), [last])["0"]


def test_log_probabilities_of_penalised_rows_are_those_of_the_host() -> None:
    asked = calls(KINDS[:3], logprobs=2, chosen_logits=True)
    rig, plain = make_rig(**SIZES), make_rig()
    for each in asked:
        rig.engine.add(each)
        plain.engine.add(each)
    deltas, expected = ([d for _ in range(60) for d in each.engine.step()] for each in (rig, plain))
    assert rig.engine.stats().steps_ahead > 0

    def told(answered: list[Any]) -> list[Any]:
        rows = [(d.request_id, d.token_ids, d.logprobs, [c.logit for c in d.logits]) for d in answered]
        return sorted(rows, key=lambda row: row[0])

    assert told(deltas) == told(expected)
