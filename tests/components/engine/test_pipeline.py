"""Pipelined steps change when things happen, and nothing else: each test says what must not show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shortfin_apps.llm.components.request.messages import Delta, FinishReason, GenerateCall
from shortfin_apps.llm.components.speculation.options import SpeculationOptions
from shortfin_apps.llm.contract.errors import DeviceLostError, InvocationError
from tests.components.engine_fixture import PROMPT, Rig, call, make_rig
from tests.components.fake_device import fake_config, greedy_continuation

OTHER = [2, 7, 1, 8, 2]


def ahead(**options: Any) -> Rig:
    return make_rig(loop_sizes=(1, 2, 4, 8), **options)


def run_to_steady(rig: Rig, *calls: GenerateCall) -> None:
    """Steps until two decode steps of all the calls have followed each other, and the second is in flight."""
    for each in calls:
        rig.engine.add(each)
    while any(len(rig.outputs.get(each.request_id, ())) < 4 for each in calls):
        rig.step()


def decodes(rig: Rig) -> int:
    return sum(name.startswith("decode") for name, _ in rig.program.calls)


@pytest.mark.parametrize("mode", ["default", "extend-attention"])
def test_a_steady_decode_uploads_nothing_and_plans_nothing(mode: str) -> None:
    config = fake_config(stride=32, max_seq_len=64, pages=16)
    rig = ahead(mode=mode, config=config, token_budget=64)
    run_to_steady(rig, call("a", [1, 2, 3], 25), call("b", [4, 5, 6], 25))
    uploads, stats = rig.device.uploads, rig.engine.stats()
    for _ in range(10):
        rig.step()
    after = rig.engine.stats()
    assert rig.device.uploads == uploads
    assert after.block_tables == stats.block_tables
    assert after.steps_ahead == stats.steps_ahead + 10
    assert after.steps == stats.steps + 10
    rig.run()
    assert rig.outputs["a"] == greedy_continuation([1, 2, 3], 25)


def test_a_step_is_queued_before_the_tokens_of_the_one_before_are_back() -> None:
    rig = ahead()
    run_to_steady(rig, call("a", PROMPT, 9))
    [in_flight] = rig.program.in_flight
    seen: list[int] = []
    rig.program.faults.call = lambda name: seen.append(len(rig.program.in_flight)) if name == "wait" else None
    rig.step()
    assert seen == [1], "the step that was in flight ran with the next one behind it"
    assert [in_flight] != list(rig.program.in_flight)


def test_no_step_is_computed_past_max_tokens() -> None:
    plain, rig = make_rig(), ahead()
    for each in (plain, rig):
        each.engine.add(call("a", PROMPT, 9))
        each.run()
    assert decodes(rig) == decodes(plain)
    assert rig.engine.stats().discarded_tokens == 0
    assert rig.engine.stats().steps_ahead > 0


def test_a_token_computed_after_a_stop_shows_nowhere() -> None:
    expected = greedy_continuation(PROMPT, 12)
    stop = next(token for token in expected[3:] if token not in expected[:3])
    plain, rig = make_rig(clock=lambda: 0.0), ahead(clock=lambda: 0.0)
    for each in (plain, rig):
        each.engine.add(call("a", PROMPT, 12, stop_token_ids=frozenset({stop})))
        each.run()
        each.engine.add(call("b", [*PROMPT, *expected], 2))
        each.run()
    assert rig.outputs == plain.outputs
    assert rig.reason("a") is FinishReason.STOP
    assert rig.last == plain.last
    before, after = plain.engine.stats(), rig.engine.stats()
    assert after.discarded_tokens == 1
    for counter in ("generation_tokens", "prompt_tokens", "cached_tokens", "pages"):
        assert getattr(after, counter) == getattr(before, counter)
    assert rig.all_pages_back()


def test_a_request_that_is_aborted_in_flight_frees_its_pages_after_the_step() -> None:
    rig = ahead(prefix_cache="none")
    run_to_steady(rig, call("a", PROMPT, 20), call("b", OTHER, 20))
    delta = rig.engine.abort("a")
    assert delta is not None
    rig.take([delta])
    kept = rig.scheduler.running[0].lease
    assert kept is not None
    assert rig.cache.usage().leased > len(kept.page_ids)
    rig.step()
    assert rig.cache.usage().leased == len(kept.page_ids)
    rig.engine.add(call("c", PROMPT, 10))
    rig.run()
    assert rig.outputs["a"] == greedy_continuation(PROMPT, len(rig.outputs["a"]))
    assert rig.outputs["b"] == greedy_continuation(OTHER, 20)
    assert rig.outputs["c"] == greedy_continuation(PROMPT, 10)
    assert rig.engine.stats().discarded_tokens == 1


def test_a_step_whose_requests_have_all_ended_is_waited_for() -> None:
    rig = ahead()
    run_to_steady(rig, call("a", PROMPT, 20))
    delta = rig.engine.abort("a")
    assert delta is not None
    assert rig.engine.has_work
    assert rig.engine.step() == []
    assert not rig.engine.has_work
    assert not rig.program.in_flight


@pytest.mark.parametrize("mode", ["default", "extend-attention"])
def test_a_new_request_waits_for_one_step_more_at_most(mode: str) -> None:
    """Of the first two steps after it arrived, one computes its prompt."""
    rig = ahead(mode=mode)
    run_to_steady(rig, call("a", [1, 2, 3], 40))
    rig.engine.add(call("b", [4, 5], 2))
    rig.step()
    rig.step()
    assert rig.scheduler.running[-1].request_id == "b"
    assert rig.scheduler.running[-1].num_computed == 2
    rig.run()
    assert rig.outputs["a"] == greedy_continuation([1, 2, 3], 40)


def test_a_request_that_does_not_fit_keeps_nobody_from_going_ahead() -> None:
    rig = ahead(config=fake_config(pages=14))
    run_to_steady(rig, call("a", [1, 2, 3], 30))
    rig.engine.add(call("large", [5] * 44, 4))
    for _ in range(3):
        rig.step()
    assert rig.scheduler.waiting
    queued = rig.engine.stats().steps_ahead
    for _ in range(5):
        rig.step()
    assert rig.engine.stats().steps_ahead == queued + 5
    rig.run()
    assert rig.outputs["large"] == greedy_continuation([5] * 44, 4)


def test_nan_in_the_page_of_a_discarded_token_reaches_nobody() -> None:
    """On a device whose mask lets NaN through, the next request that gets the page would fail."""
    rig = ahead(prefix_cache="none", reads_masked=True, config=fake_config(pages=8))
    run_to_steady(rig, call("a", [1, 2, 3], 20))
    [request] = rig.scheduler.running
    own = set(request.page_ids)
    delta = rig.engine.abort("a")
    assert delta is not None
    rig.program.faults.spoil = lambda row: True
    rig.step()
    rig.program.faults.spoil = lambda row: False
    assert np.isnan(rig.slab.array[sorted(own)]).any()
    rig.engine.add(call("b", [4] * 20, 4))
    rig.run()
    assert rig.outputs["b"] == greedy_continuation([4] * 20, 4)
    assert not np.isnan(rig.slab.array).any()


def test_a_row_of_nan_ends_its_request_alone() -> None:
    rig = ahead(reads_masked=True)
    run_to_steady(rig, call("a", [1, 2, 3], 20), call("b", OTHER, 20))
    rig.program.faults.spoil = lambda row: row == 0
    rig.step()
    rig.program.faults.spoil = lambda row: False
    rig.run()
    assert rig.reason("a") is FinishReason.ERROR
    assert rig.outputs["a"] == greedy_continuation([1, 2, 3], len(rig.outputs["a"]))
    assert rig.outputs["b"] == greedy_continuation(OTHER, 20)
    rig.engine.add(call("c", [1, 2, 3], 20))
    rig.run()
    assert rig.outputs["c"] == greedy_continuation([1, 2, 3], 20)
    assert rig.all_pages_back()


@pytest.mark.parametrize(
    "error", [InvocationError("broken"), RuntimeError("broken"), DeviceLostError("gone")]
)
def test_a_failure_in_flight_ends_the_requests_of_the_step_and_nobody_else(error: Exception) -> None:
    rig = ahead()
    run_to_steady(rig, call("a", [1, 2, 3], 20), call("b", OTHER, 20))
    rig.engine.add(call("c", PROMPT, 5))

    def fail(entry: str) -> None:
        raise error

    rig.program.faults.before = fail
    rig.step()
    rig.program.faults.before = lambda entry: None
    assert not rig.program.in_flight
    assert {name: rig.reason(name) for name in rig.last} == dict.fromkeys("ab", FinishReason.ERROR)
    assert rig.engine.stats().consecutive_failures == 1
    assert (rig.engine.stats().lost_device is not None) == isinstance(error, DeviceLostError)
    rig.run()
    assert rig.outputs["c"] == greedy_continuation(PROMPT, 5)
    assert rig.all_pages_back()


def test_a_bug_outside_an_invocation_leaves_nothing_in_flight() -> None:
    rig = ahead()
    run_to_steady(rig, call("a", [1, 2, 3], 20))
    rig.take(rig.engine.fail_all(InvocationError("a bug")))
    assert not rig.program.in_flight
    assert not rig.engine.has_work
    rig.engine.add(call("b", [1, 2, 3], 20))
    rig.run()
    assert rig.outputs["b"] == greedy_continuation([1, 2, 3], 20)


@pytest.mark.parametrize(
    "params",
    [{"logprobs": 1}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}, {"min_tokens": 8}],
    ids=["log-probabilities", "whole row", "more than the candidates", "banned tokens"],
)
def test_what_the_device_cannot_sample_is_waited_for(params: dict[str, Any]) -> None:
    rig = ahead(eos=frozenset({7, 9, 11}))
    rig.engine.add(call("a", [1, 2, 3], 8, **params))
    rig.run()
    assert rig.engine.stats().steps_ahead == 0


def test_depth_0_uses_no_loop() -> None:
    rig = ahead(depth=0)
    rig.engine.add(call("a", [1, 2, 3], 8))
    rig.run()
    assert not any(name.startswith("decode_loop") for name, _ in rig.program.calls)
    assert rig.engine.stats().steps_ahead == 0


def test_more_requests_than_the_largest_loop_are_decoded_as_ever() -> None:
    rig = make_rig(loop_sizes=(2,))
    for name in "abc":
        rig.engine.add(call(name, [ord(name) % 32], 6))
    rig.run()
    for name in "abc":
        assert rig.outputs[name] == greedy_continuation([ord(name) % 32], 6)


def within_max_tokens(given: dict[str, Any]) -> dict[str, Any]:
    return given | {"min_tokens": min(given["min_tokens"], given["max_tokens"])}


params = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 16),
        "temperature": st.sampled_from([0.0, 0.7, 1.5]),
        "top_k": st.sampled_from([0, 1, 3, 4, 6]),
        "top_p": st.sampled_from([1.0, 0.6]),
        "min_p": st.sampled_from([0.0, 0.2]),
        "stop_token_ids": st.frozensets(st.integers(0, 31), max_size=6),
        "ignore_eos": st.booleans(),
        "min_tokens": st.sampled_from([0, 0, 1, 5]),
        "logprobs": st.sampled_from([None, None, None, 1, 4, 5]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, -0.3]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.4]),
        "logit_bias": st.sampled_from([(), (), ((3, 2.0), (5, -1.0))]),
        "bad_words": st.sampled_from([(), (), ((1,),), ((2, 3), (4,))]),
        "allowed_token_ids": st.sampled_from([None, None, None, frozenset(range(12))]),
        "chosen_logits": st.sampled_from([False, False, False, True]),
    }
).map(within_max_tokens)
speculations = st.sampled_from([None, None, SpeculationOptions(max_tokens=4, row_cost=0)])
arrivals = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=24), params, st.integers(0, 20)),
    min_size=1,
    max_size=9,
)


def served(rig: Rig, asked: list[tuple[list[int], dict[str, Any], int]]) -> dict[str, list[Delta]]:
    """Every request that arrives before its step; the deltas of each."""
    deltas: dict[str, list[Delta]] = {}
    for step in range(10_000):
        for index, (prompt, given_params, at) in enumerate(asked):
            if at == step:
                rig.engine.add(call(str(index), prompt, seed=index, **given_params))
        if not rig.engine.has_work and step > 20:
            return deltas
        step_deltas = rig.engine.step()
        rig.take(step_deltas)
        for delta in step_deltas:
            deltas.setdefault(delta.request_id, []).append(delta)
    raise AssertionError("the engine makes no progress")


@settings(max_examples=80, deadline=None)
@given(
    arrivals,
    st.sampled_from(["default", "extend-attention"]),
    st.sampled_from([13, 20, 64]),
    st.integers(1, 8),
    st.sampled_from([(1, 8), (2,), (8,)]),
    st.sampled_from([(), (1, 8), (3,)]),
    st.sampled_from([(), (1, 8), (3,)]),
    st.sampled_from([1, 2]),
    speculations,
)
def test_answers_usage_and_cache_are_those_without(
    asked: list[tuple[list[int], dict[str, Any], int]],
    mode: str,
    pages: int,
    max_running: int,
    loop_sizes: tuple[int, ...],
    sample_sizes: tuple[int, ...],
    logprob_sizes: tuple[int, ...],
    depth: int,
    speculation: SpeculationOptions | None,
) -> None:
    """Arrivals at any step, with stops, every kind of sampling and, on the smallest pool, preemption."""
    rigs = [
        make_rig(
            fake_config(pages=pages),
            mode=mode,
            max_running=max_running,
            eos=frozenset({7}),
            repeats=0.5,
            loop_sizes=loops,
            sample_sizes=samples,
            adjusted_sample_sizes=samples,
            logprob_sizes=logprobs,
            depth=depth,
            speculation=speculation,
        )
        for loops, samples, logprobs in (((), (), ()), (loop_sizes, sample_sizes, logprob_sizes))
    ]
    plain, rig = rigs
    expected, got = (served(each, asked) for each in rigs)
    for name, deltas in expected.items():
        assert [d.token_ids for d in got[name]] == [d.token_ids for d in deltas]
        assert got[name][-1].finish_reason is deltas[-1].finish_reason
        assert got[name][-1].stop_token_id == deltas[-1].stop_token_id
        for one, other in zip(got[name], deltas, strict=True):
            assert one.logprobs == other.logprobs
            assert [each.logit for each in one.logits] == [each.logit for each in other.logits]
    assert rig.engine.stats().generation_tokens == plain.engine.stats().generation_tokens
    if pages == 64:  # nothing was evicted
        for index, (prompt, _, _) in enumerate(asked):
            tokens = [*prompt, *rig.outputs[str(index)], 0]
            assert rig.cache.match_length(tokens) == plain.cache.match_length(tokens)
    assert rig.all_pages_back()
