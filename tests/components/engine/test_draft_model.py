"""A draft model beside a model: the tokens are those without it, whatever it drafts and however it fails."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shortfin_apps.llm.components.engine.drafter import MAX_FAILURES
from shortfin_apps.llm.components.request.messages import FinishReason
from shortfin_apps.llm.components.speculation.options import SpeculationOptions
from shortfin_apps.llm.contract.errors import DeviceLostError
from tests.components.engine.test_speculation import (
    MODES,
    PLACES,
    REQUESTS,
    Requests,
    answers,
    calls_of,
    counts,
)
from tests.components.engine_fixture import PROMPT, FakeDraft, Rig, call, make_draft, make_rig
from tests.components.fake_device import fake_config, greedy_continuation

ALONE = SpeculationOptions(max_tokens=0, row_cost=0)  # drafts, and what grammars force
EOS = frozenset({11})


def drafting(draft: FakeDraft, **options: Any) -> Rig:
    options = {"mode": "extend-attention", "speculation": ALONE, **options}
    return make_rig(fake_config(pages=64), draft=draft, **options)


@settings(max_examples=60, deadline=None)
@given(
    errs=st.floats(0, 1),
    repeats=st.sampled_from([0, 0.6]),
    requests=REQUESTS,
    max_tokens=st.integers(1, 9),
    lookup_tokens=st.sampled_from([0, 3]),
    costs=st.sampled_from([(0, 0), (0.01, 0.1), (0.1, 0.4)]),
    mode=st.sampled_from(MODES),
    place=st.sampled_from(PLACES),
    pages=st.tuples(st.sampled_from([16, 18, 64]), st.sampled_from([3, 16, 18, 64])),
    windows=st.tuples(st.none() | st.integers(1, 12), st.none() | st.integers(1, 12)),
    strides=st.sampled_from([4, 8]),
    prefix_cache=st.sampled_from(["none", "trie"]),
    token_budget=st.sampled_from([8, 40]),
    catch_up_tokens=st.sampled_from([1, 7, 64]),
    loop_sizes=st.sampled_from([(1, 2, 4, 8), (8,)]),
    depth=st.sampled_from([0, 1, 2]),
    faults=st.lists(st.integers(0, 60), max_size=4),
    spoiled=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3)), max_size=4),
)
def test_tokens_are_those_without(
    errs: float,
    repeats: float,
    requests: Requests,
    max_tokens: int,
    lookup_tokens: int,
    costs: tuple[float, float],
    place: dict[str, Any],
    pages: tuple[int, int],
    windows: tuple[int | None, int | None],
    strides: int,
    prefix_cache: Any,
    catch_up_tokens: int,
    loop_sizes: tuple[int, ...],
    faults: list[int],
    spoiled: list[tuple[int, int]],
    **options: Any,
) -> None:
    """Whether it is right always, never, or at times; in few pages, beside lookups, and when it fails."""
    calls = calls_of(requests)
    options |= {"repeats": repeats, "eos": EOS, "prefix_cache": prefix_cache, **place}
    config = fake_config(pages=pages[0], window=windows[0])
    expected = answers(make_rig(config, **options), calls)

    draft = make_draft(
        fake_config(pages=pages[1], window=windows[1], stride=strides),
        repeats=repeats,
        errs=errs,
        max_tokens=max_tokens,
        round_cost=costs[1],
        catch_up_tokens=catch_up_tokens,
        prefix_cache=prefix_cache,
        loop_sizes=loop_sizes,
    )
    make_faulty(draft, faults, spoiled)
    speculation = SpeculationOptions(max_tokens=lookup_tokens, row_cost=costs[0])
    rig = make_rig(config, speculation=speculation, draft=draft, **options)
    assert answers(rig, calls, [arrival for *_, arrival in requests]) == expected


def make_faulty(draft: FakeDraft, faults: list[int], spoiled: list[tuple[int, int]]) -> None:
    """The calls of its program with those numbers fail, and of others a row is NaN."""

    def before(entry: str) -> None:
        if len(draft.program.calls) in faults:
            raise RuntimeError("broken")

    draft.program.faults.before = before
    draft.program.faults.spoil = lambda row: (len(draft.program.calls), row) in spoiled


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_drafts_what_is_chosen_is_always_right(mode: str, place: dict[str, Any]) -> None:
    """Beside others, and behind tokens that it drafted before: nothing that it stored is lost or stale.

    It draws with the random numbers of the model.
    """
    draft = make_draft(fake_config(pages=64))
    rig = drafting(draft, mode=mode, **place)
    calls = [call(str(i), [i, *PROMPT[:9]], 40, temperature=i / 2, seed=i) for i in range(3)]
    plain = make_rig(fake_config(pages=64), mode=mode, **place)
    assert answers(rig, calls) == answers(plain, calls)
    proposed, accepted = counts(rig)
    assert proposed == accepted > 70
    assert rig.engine.stats().steps < plain.engine.stats().steps / 2


def test_four_drafted_tokens_and_the_one_behind_them_take_a_step() -> None:
    draft = make_draft(fake_config(pages=64), max_tokens=4)
    rig = drafting(draft, token_budget=64)
    answers(rig, [call("a", PROMPT[:9], 41)])
    assert counts(rig) == (32, 32)
    assert rig.engine.stats().steps == 1 + 40 // 5


def test_all_requests_share_a_round() -> None:
    draft = make_draft(fake_config(pages=64), catch_up_tokens=100)
    rig = drafting(draft, token_budget=64)
    answers(rig, [call(str(i), [i, *PROMPT[:9]], 6) for i in range(3)])
    names = [name for name, _ in draft.program.calls]
    assert names == ["extend", "sample_bs4", *["decode_loop_bs4"] * 3]


def test_a_prompt_is_caught_up_with_in_chunks() -> None:
    """Meanwhile the request is decoded without drafts."""
    draft = make_draft(fake_config(pages=64), catch_up_tokens=5)
    rig = drafting(draft, token_budget=64)
    rig.engine.add(call("a", PROMPT, 12))
    rig.run()
    assert rig.outputs["a"] == greedy_continuation(PROMPT, 12)
    lengths = [shape[0] for name, shape in draft.program.calls if name == "extend"]
    assert lengths[:4] == [5, 5, 5, 5]
    assert counts(rig)[0] > 0


def test_a_step_is_queued_before_anything_of_it_is_waited_for() -> None:
    """The rounds, and the model's invocation after them."""
    draft = make_draft(fake_config(pages=64), max_tokens=4, catch_up_tokens=64)
    rig = drafting(draft, token_budget=64)
    for index in range(3):
        rig.engine.add(call(str(index), [index, *PROMPT[:9]], 30))
    rig.step()
    made: list[tuple[str, str]] = []
    draft.program.faults.call = lambda name: made.append(("draft", name))
    rig.program.faults.call = lambda name: made.append(("model", name))
    rig.step()
    calls = [(whose, name) for whose, name in made if name in ("submit", "wait")]
    submits = [whose for whose, name in calls if name == "submit"]
    assert submits.count("draft") >= 4
    assert submits[-1] == "model"
    assert all(name == "submit" for _, name in calls[: len(submits)])


def test_a_prefix_is_computed_once() -> None:
    draft = make_draft(fake_config(pages=64), catch_up_tokens=64)
    rig = drafting(draft, token_budget=64)
    for name in "ab":
        rig.engine.add(call(name, PROMPT, 4))
        rig.run()
    first, second = [shape[0] for name, shape in draft.program.calls if name == "extend"][:2]
    assert (first, second) == (len(PROMPT) + 1, len(PROMPT) + 1 - 16)


def test_prefixes_of_other_salts_are_not_shared() -> None:
    draft = make_draft(fake_config(pages=64), catch_up_tokens=64)
    rig = drafting(draft, token_budget=64)
    for salt in "ab":
        rig.engine.add(call(salt, PROMPT, 4, salt=salt))
        rig.run()
    assert [shape[0] for name, shape in draft.program.calls if name == "extend"][:2] == [len(PROMPT) + 1] * 2


def test_nothing_is_drafted_where_a_round_costs_more_than_it_yields() -> None:
    draft = make_draft(fake_config(pages=64), round_cost=1)
    rig = drafting(draft)
    answers(rig, [call("a", PROMPT[:5], 20)])
    assert draft.program.calls == []


def test_a_draft_model_that_is_always_wrong_is_asked_less_and_less() -> None:
    draft = make_draft(fake_config(pages=64, max_seq_len=64), errs=1, round_cost=0.2)
    rig = drafting(draft, speculation=SpeculationOptions(max_tokens=0, row_cost=0.05))
    rig.engine.add(call("a", PROMPT[:4], 58))
    rig.run()
    proposed, accepted = counts(rig)
    assert accepted == 0
    assert 0 < proposed < 40
    steps = rig.engine.stats().steps
    assert len(draft.program.calls) < steps


def test_a_request_longer_than_the_drafts_context_goes_on_without() -> None:
    draft = make_draft(fake_config(pages=64, max_seq_len=16))
    rig = drafting(draft)
    rig.engine.add(call("a", PROMPT[:6], 30))
    rig.run()
    assert rig.outputs["a"] == greedy_continuation(PROMPT[:6], 30)
    assert 0 < counts(rig)[1] < 16


def test_a_few_failures_end_drafting_and_no_request(caplog: pytest.LogCaptureFixture) -> None:
    draft = make_draft(fake_config(pages=64))
    make_faulty(draft, list(range(1000)), [])
    rig = drafting(draft)
    rig.engine.add(call("a", PROMPT[:6], 20))
    rig.run()
    assert rig.outputs["a"] == greedy_continuation(PROMPT[:6], 20)
    assert rig.reason("a") is FinishReason.LENGTH
    assert [name for name, _ in draft.program.calls].count("extend") == MAX_FAILURES
    assert "not used any more" in caplog.text


def test_a_lost_device_is_not_tried_again() -> None:
    draft = make_draft(fake_config(pages=64))

    def lost(entry: str) -> None:
        raise DeviceLostError("gone")

    draft.program.faults.before = lost
    rig = drafting(draft)
    rig.engine.add(call("a", PROMPT[:6], 20))
    rig.run()
    assert draft.model.has_given_up
    assert [name for name, _ in draft.program.calls].count("extend") == 1


def test_aborted_requests_leave_no_pages() -> None:
    draft = make_draft(fake_config(pages=64))
    rig = drafting(draft)
    for i in range(30):
        rig.engine.add(call(str(i), [i, *PROMPT[:6]], 20))
        for _ in range(3):
            rig.step()
        rig.take([delta for delta in [rig.engine.abort(str(i))] if delta is not None])
    assert rig.all_pages_back()
    assert draft.cache.usage().leased == 0
