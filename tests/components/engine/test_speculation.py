"""Proposed tokens change nothing but the number of steps: whatever the model, and whatever runs beside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shortfin_apps.llm.components.batching.batch import Batch
from shortfin_apps.llm.components.invocation.batch_result import BatchResult
from shortfin_apps.llm.components.invocation.launch import Launch
from shortfin_apps.llm.components.request.messages import Delta, FinishReason, GenerateCall
from shortfin_apps.llm.components.speculation.options import SpeculationOptions
from tests.components.engine_fixture import PROMPT, Rig, call, make_rig
from tests.components.fake_device import VOCAB, fake_config, greedy_continuation
from tests.components.forcing_grammar import Keys

ALWAYS = SpeculationOptions(max_tokens=4, row_cost=0)  # whatever may be right
MODES = ("default", "extend-attention")
PLACES: list[dict[str, Any]] = [
    {},
    {"loop_sizes": (1, 2, 4, 8)},
    {"loop_sizes": (1, 2, 4, 8), "sample_sizes": (1, 2, 4, 8)},
    {"loop_sizes": (1, 2, 4, 8), "sample_sizes": (1, 2, 4, 8), "adjusted_sample_sizes": (1, 2, 4, 8)},
]


class FewTokens:
    """A grammar: after an even token a multiple of 3, else anything but multiples of 5."""

    param = "grammar"

    def matcher(self) -> FewTokens:
        return self

    def allowed(self, generated: Sequence[int], ahead: Sequence[int] = ()) -> bytes:
        text = [*generated, *ahead]
        is_even = bool(text) and text[-1] % 2 == 0
        allowed = [i % 3 == 0 if is_even else i % 5 != 0 for i in range(VOCAB)]
        return np.packbits(allowed, bitorder="little").tobytes()

    def forced(self, generated: Sequence[int]) -> Sequence[int]:
        return ()


PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "seed": 3, "top_k": 4},
    {"temperature": 1.0, "seed": 5},
    {"presence_penalty": 1.5, "repetition_penalty": 1.2},
    {"logprobs": 2, "min_tokens": 9, "stop_token_ids": frozenset(range(16))},
    {"output_grammar": FewTokens()},
    {"output_grammar": Keys()},
    {"output_grammar": Keys(), "temperature": 0.8, "seed": 4, "logprobs": 1},
    {"output_grammar": Keys(), "temperature": 1.0, "seed": 9, "repetition_penalty": 1.2},
    {"stop_token_ids": frozenset({3, 8})},
    {"min_tokens": 5, "stop_token_ids": frozenset(range(24))},
    {"bad_words": ((5,), (6, 7)), "temperature": 0.5, "seed": 1},
    {"forced_token_ids": (1, 2, 3, 1, 2, 3, 1, 2), "logprobs": 0},
]
# Of each: which of PARAMS, the lengths of prompt and answer, and the step before which it arrives.
Requests = list[tuple[int, int, int, int]]
REQUESTS = st.lists(
    st.tuples(st.integers(0, len(PARAMS) - 1), st.integers(1, 30), st.integers(1, 24), st.integers(0, 20)),
    min_size=1,
    max_size=6,
)


def counts(rig: Rig) -> tuple[int, int]:
    """Return how many tokens were proposed, and how many of them accepted."""
    found = rig.engine.stats().speculation
    assert found is not None
    return found.proposed, found.accepted


def calls_of(requests: Requests) -> list[GenerateCall]:
    """Create the requests; their prompts have a common beginning."""
    stem = np.random.default_rng(7).integers(0, 4, 30).tolist()
    return [
        call(str(i), [*stem[:length]], max(count, PARAMS[kind].get("min_tokens", 0)), **PARAMS[kind])
        for i, (kind, length, count, _) in enumerate(requests)
    ]


def answers(rig: Rig, calls: list[GenerateCall], arrivals: list[int] | None = None) -> dict[str, Any]:
    """Tokens, log-probabilities and how it ended, by request; request i arrives before step `arrivals[i]`."""
    due = sorted(zip(arrivals or [0] * len(calls), range(len(calls)), strict=True))
    deltas: list[Delta] = []
    step = 0
    while due or rig.engine.has_work:
        while due and due[0][0] <= step:
            rig.engine.add(calls[due.pop(0)[1]])
        new = rig.engine.step()
        rig.take(new)
        deltas += new
        step += 1
        assert step < 5000, "the engine makes no progress"
    assert rig.all_pages_back()
    return {
        wanted.request_id: (
            [token for delta in of(deltas, wanted) for token in delta.token_ids],
            [logprob for delta in of(deltas, wanted) for logprob in delta.logprobs],
            of(deltas, wanted)[-1].finish_reason,
            of(deltas, wanted)[-1].stop_token_id,
        )
        for wanted in calls
    }


def of(deltas: list[Delta], wanted: GenerateCall) -> list[Delta]:
    return [delta for delta in deltas if delta.request_id == wanted.request_id]


@settings(max_examples=60, deadline=None)
@given(
    repeats=st.floats(0, 1),
    requests=REQUESTS,
    max_tokens=st.integers(0, 9),
    jump_ahead=st.booleans(),
    row_cost=st.sampled_from([0, 0.01, 0.2]),
    mode=st.sampled_from(MODES),
    place=st.sampled_from(PLACES),
    pages=st.sampled_from([16, 18, 24, 64]),
    window=st.sampled_from([None, "states"]) | st.integers(1, 12),
    more_window_pages=st.sampled_from([0, 2, 8, 40]),
    prefix_cache=st.sampled_from(["none", "trie"]),
    token_budget=st.sampled_from([8, 12, 40]),
    depth=st.integers(0, 2),
)
def test_tokens_are_those_without(
    repeats: float,
    requests: Requests,
    max_tokens: int,
    jump_ahead: bool,
    row_cost: float,
    place: dict[str, Any],
    pages: int,
    window: int | str | None,
    **options: Any,
) -> None:
    """For a model that repeats itself never, always, or something between; beside others, in few pages."""
    calls = calls_of(requests)
    arrivals = [arrival for *_, arrival in requests]
    options |= {"repeats": repeats, "eos": frozenset({11}), **place}

    def rig(**more: Any) -> Rig:
        seen: dict[str, Any] = {"states": True} if window == "states" else {"window": window}
        return make_rig(fake_config(pages=pages, **seen), **options, **more)

    expected = answers(rig(jump_ahead=False), calls)
    speculation = SpeculationOptions(max_tokens=max_tokens, row_cost=row_cost)
    assert answers(rig(jump_ahead=jump_ahead, speculation=speculation), calls, arrivals) == expected


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", MODES)
def test_fewer_steps_are_taken_where_the_model_repeats_itself(mode: str, place: dict[str, Any]) -> None:
    config = fake_config(pages=64)
    plain, speculating = (
        make_rig(config, mode=mode, repeats=1, speculation=speculation, **place)
        for speculation in (None, ALWAYS)
    )
    calls = [call(str(i), [i, *PROMPT, *PROMPT[:3]], 40) for i in range(3)]
    assert answers(plain, calls) == answers(speculating, calls)
    before, after = plain.engine.stats(), speculating.engine.stats()
    assert before.speculation is None
    assert after.speculation is not None
    assert after.steps < before.steps / 1.8
    assert after.generation_tokens == before.generation_tokens
    assert after.speculation.accepted > after.speculation.proposed / 2
    assert after.speculation.drafts <= after.speculation.proposed


@pytest.mark.parametrize("params", PARAMS[:3])
def test_the_device_draws_the_tokens_after_proposed_ones(params: dict[str, Any]) -> None:
    rig = make_rig(mode="extend-attention", repeats=1, speculation=ALWAYS, **PLACES[2])

    def result(launch: Launch) -> BatchResult:
        raise AssertionError("the host reads no row")

    rig.engine._runner.result = result  # type: ignore[method-assign]
    answers(rig, [call("a", [*PROMPT, *PROMPT[:3]], 12, **params)])
    counts = rig.engine.stats().speculation
    assert counts is not None
    assert counts.accepted


def test_nothing_is_proposed_for_what_does_not_repeat() -> None:
    rig = make_rig(speculation=ALWAYS, mode="extend-attention")
    answers(rig, [call("a", list(range(30)), 2)])
    counts = rig.engine.stats().speculation
    assert counts is not None
    assert counts.proposed == 0
    assert rig.engine.stats().steps == len(rig.program.calls)


def test_proposals_take_what_the_budget_leaves() -> None:
    """No invocation is larger than the budget, with prompts and decodes of others."""
    rig = make_rig(
        fake_config(pages=64), mode="extend-attention", token_budget=16, repeats=1, speculation=ALWAYS
    )
    sizes: list[int] = []
    launch = rig.engine._pipeline.launch

    def noting(batch: Batch, began_s: float) -> None:
        sizes.append(sum(len(task.token_ids) for task in batch.tasks))
        launch(batch, began_s)

    rig.engine._pipeline.launch = noting  # type: ignore[method-assign]
    answers(rig, [call(str(i), [i, *PROMPT], 30) for i in range(6)], [0, 0, 3, 6, 9, 12])
    assert max(sizes) == 16


def test_a_request_gets_no_more_than_its_max_tokens() -> None:
    for count in range(1, 9):
        rig = make_rig(fake_config(pages=64), repeats=1, extend_rank=1, speculation=ALWAYS)
        answers(rig, [call("a", [*PROMPT, *PROMPT[:6]], count)])
        assert rig.outputs["a"] == greedy_continuation([*PROMPT, *PROMPT[:6]], count, repeats=1)
        assert rig.reason("a") is FinishReason.LENGTH


@pytest.mark.parametrize("more_window_pages", [1, 3, 30])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", MODES)
def test_states_go_back_to_the_last_accepted_token(
    mode: str, place: dict[str, Any], more_window_pages: int
) -> None:
    """At each place of a page; with few pages for states, fewer tokens are proposed."""
    rig = make_rig(
        fake_config(pages=64, states=True),
        mode=mode,
        repeats=0.8,
        speculation=ALWAYS,
        more_window_pages=more_window_pages,
        **place,
    )
    most = 0
    launch = rig.engine._pipeline.launch

    def noting(batch: Batch, began_s: float) -> None:
        nonlocal most
        most = max(most, sum(task.state_page_id is not None for task in batch.tasks))
        assert all((task.state_page_id is not None) is (task.num_ahead > 0) for task in batch.tasks)
        launch(batch, began_s)

    rig.engine._pipeline.launch = noting  # type: ignore[method-assign]
    for length in range(4, 12):
        prompt = [*PROMPT[:length], *PROMPT[:length]]
        answers(rig, [call(str(length), prompt, 30)])
        assert rig.outputs[str(length)] == greedy_continuation(prompt, 30, repeats=0.8)
    counts = rig.engine.stats().speculation
    assert counts is not None
    assert 0 < counts.accepted < counts.proposed
    assert most == ALWAYS.max_tokens or more_window_pages < 30


def check_others_after_nan(rig: Rig, row: int) -> None:
    """The row is NaN in two invocations; what a request yields is right all the same, then and later."""
    rig.program.faults.spoil = lambda index: index == row and len(rig.program.calls) in (6, 8)
    prompts = {"a": [*PROMPT, *PROMPT[:5]], "b": [*PROMPT[3:], *PROMPT[:5]]}
    for name, prompt in prompts.items():
        rig.engine.add(call(name, prompt, 20))
    rig.run()
    for name, prompt in prompts.items():
        assert rig.outputs[name] == greedy_continuation(prompt, 20, repeats=0.7)[: len(rig.outputs[name])]
    for length in (1, 6, 11, 19):
        rig.engine.add(call(str(length), PROMPT[:length], 36 - length))
        rig.run()
        assert rig.outputs[str(length)] == greedy_continuation(PROMPT[:length], 36 - length, repeats=0.7)
    assert rig.all_pages_back()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("row", range(6))
def test_nan_in_a_state_reaches_nobody_else(row: int, place: dict[str, Any]) -> None:
    """Neither a request that runs beside it, nor one that gets the pages later, whoever draws its tokens."""
    rig = make_rig(
        fake_config(pages=24, states=True),
        mode="extend-attention",
        repeats=0.7,
        speculation=ALWAYS,
        more_window_pages=8,
        **place,
    )
    check_others_after_nan(rig, row)


@pytest.mark.parametrize("reads_masked", [False, True])
@pytest.mark.parametrize("row", range(6))
def test_nan_in_a_row_reaches_nobody_else(row: int, reads_masked: bool) -> None:
    """It ends its request if the row counts; a stale one is forgotten, and its slot is written anew."""
    rig = make_rig(fake_config(pages=24), mode="extend-attention", repeats=0.7, speculation=ALWAYS)
    rig.program.reads_masked = reads_masked
    check_others_after_nan(rig, row)


def test_a_failed_invocation_ends_each_of_its_requests_once() -> None:
    rig = make_rig(fake_config(pages=64), repeats=1, mode="extend-attention", speculation=ALWAYS)
    rig.engine.add(call("a", [*PROMPT, *PROMPT[:6]], 30))
    while not (counts := rig.engine.stats().speculation) or not counts.proposed:
        rig.step()

    def broken(entry: str) -> None:
        raise RuntimeError("broken")

    rig.program.faults.before = broken
    rig.run()
    assert rig.reason("a") is FinishReason.ERROR
    assert rig.all_pages_back()


def test_an_aborted_request_leaves_no_draft() -> None:
    rig = make_rig(fake_config(pages=64), repeats=1, mode="extend-attention", speculation=ALWAYS)
    for i in range(30):
        rig.engine.add(call(str(i), [i, *PROMPT, *PROMPT[:6]], 20))
        rig.step()
        rig.step()
        rig.take([delta for delta in [rig.engine.abort(str(i))] if delta is not None])
    assert rig.engine._speculation is not None
    assert len(rig.engine._speculation._lookups) <= 2


@pytest.mark.parametrize(("extend_s", "goes_on"), [(3.0, True), (9.0, False)])
@pytest.mark.parametrize("place", PLACES)
def test_proposals_go_on_if_they_are_faster(place: dict[str, Any], extend_s: float, goes_on: bool) -> None:
    """A decode takes a second. The engine finds out within a trial of either kind of steps."""
    now_s = 0.0

    def take_time(entry: str) -> None:
        nonlocal now_s
        now_s += extend_s if entry.startswith("extend") else float(entry.startswith("decode"))

    rig = make_rig(
        fake_config(pages=128),
        repeats=1,
        speculation=ALWAYS,
        mode="extend-attention",
        clock=lambda: now_s,
        **place,
    )
    rig.program.faults.before = take_time
    proposed = []
    for name in "abc":
        answers(rig, [call(name, [*PROMPT, *PROMPT[:6]], 160)])
        proposed.append(counts(rig)[0])
    assert (proposed[-1] > proposed[-2]) == goes_on
    assert proposed[0]
