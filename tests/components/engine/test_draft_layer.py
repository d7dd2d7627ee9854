"""A model that drafts with its own layer: the tokens are those without, whatever it drafts, and if it fails.

The fake device checks which hidden state each row reads.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shortfin_apps.llm.components.batching.batch import LlmTaskInput
from shortfin_apps.llm.components.engine.drafter import MAX_FAILURES
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.components.speculation.options import SpeculationOptions
from shortfin_apps.llm.contract.abi import HIDDEN_PER_SLOT
from tests.components.engine.test_speculation import (
    MODES,
    PLACES,
    REQUESTS,
    Requests,
    answers,
    calls_of,
    counts,
)
from tests.components.engine_fixture import PROMPT, Rig, call, make_rig
from tests.components.fake_device import fake_config
from tests.components.forcing_grammar import Keys

ALONE = SpeculationOptions(max_tokens=0, row_cost=0)
EOS = frozenset({11})


@settings(max_examples=60, deadline=None)
@given(
    errs=st.floats(0, 1),
    repeats=st.sampled_from([0, 0.6]),
    requests=REQUESTS,
    lookup_tokens=st.sampled_from([0, 3]),
    row_cost=st.sampled_from([0, 0.01, 0.1]),
    mode=st.sampled_from(MODES),
    place=st.sampled_from(PLACES),
    depth=st.sampled_from([0, 1, 2]),
    pages=st.sampled_from([16, 18, 64]),
    states=st.booleans(),
    prefix_cache=st.sampled_from(["none", "trie"]),
    token_budget=st.sampled_from([8, 40]),
    faults=st.lists(st.integers(0, 60), max_size=4),
    spoiled=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3)), max_size=4),
)
def test_tokens_are_those_without(
    errs: float,
    repeats: float,
    requests: Requests,
    lookup_tokens: int,
    row_cost: float,
    place: dict[str, Any],
    pages: int,
    states: bool,
    faults: list[int],
    spoiled: list[tuple[int, int]],
    **options: Any,
) -> None:
    """Whether it is right always, never, or at times; in few pages, beside lookups, and when it fails."""
    calls = calls_of(requests)
    options |= {"repeats": repeats, "eos": EOS, **place}
    config = fake_config(pages=pages, states=states)
    expected = answers(make_rig(config, **options), calls)
    rig = make_rig(
        config,
        speculation=SpeculationOptions(max_tokens=lookup_tokens, row_cost=row_cost),
        drafts=errs,
        **options,
    )
    make_faulty(rig, faults, spoiled)
    assert answers(rig, calls, [arrival for *_, arrival in requests]) == expected
    assert not rig.program.misuse


def make_faulty(rig: Rig, faults: list[int], spoiled: list[tuple[int, int]]) -> None:
    """The drafts with those numbers fail, and of others a row is NaN."""
    number, is_draft = 0, False

    def before(entry: str) -> None:
        nonlocal number, is_draft
        is_draft = entry.startswith("draft")
        number += is_draft
        if is_draft and number in faults:
            raise RuntimeError("broken")

    rig.program.faults.before = before
    rig.program.faults.spoil = lambda row: is_draft and (number, row) in spoiled


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", MODES)
def test_a_layer_that_drafts_what_is_chosen_is_always_right(
    mode: str, place: dict[str, Any], states: bool
) -> None:
    """Beside others: no hidden state is unknown, but for the first token of a cached prefix."""
    options: dict[str, Any] = {"mode": mode, "token_budget": 64, **place}
    config = fake_config(pages=64, states=states)
    calls = [call(str(i), [i, *PROMPT[:9]], 40) for i in range(3)]
    plain = make_rig(config, **options)
    rig = make_rig(config, speculation=ALONE, drafts=0.0, **options)
    assert answers(rig, calls) == answers(plain, calls)
    proposed, accepted = counts(rig)
    assert proposed == accepted > 70
    assert rig.engine.stats().steps < plain.engine.stats().steps / 2


def test_as_many_tokens_as_the_table_has_rows_for_take_a_step() -> None:
    rig = make_rig(
        fake_config(pages=64), mode="extend-attention", token_budget=64, speculation=ALONE, drafts=0.0
    )
    answers(rig, [call("a", PROMPT[:9], 41)])
    assert rig.engine.stats().steps == 1 + -(-40 // HIDDEN_PER_SLOT)


def test_all_requests_share_a_round() -> None:
    rig = make_rig(
        fake_config(pages=64), mode="extend-attention", token_budget=64, speculation=ALONE, drafts=0.0
    )
    answers(rig, [call(str(i), [i, *PROMPT[:9]], 4) for i in range(3)])
    names = [name for name, _ in rig.program.calls]
    assert names == ["extend", "draft_bs4", "draft_bs4", "extend"]


def test_more_requests_than_the_largest_draft_has_rows_take_several() -> None:
    config = fake_config(pages=64, decode=(2,))
    rig = make_rig(config, mode="extend-attention", token_budget=64, speculation=ALONE, drafts=0.0)
    calls = [call(str(i), [i, *PROMPT[:9]], 4) for i in range(3)]
    plain = make_rig(config, mode="extend-attention", token_budget=64)
    assert answers(rig, calls) == answers(plain, calls)
    assert [name for name, _ in rig.program.calls].count("draft_bs2") == 4


def test_forced_tokens_are_computed_before_a_draft() -> None:
    """The hidden state of the last of them is not known, and drafts would overwrite the one before them."""
    for length in range(1, 30):
        calls = [call("a", [*range(length)], 20, output_grammar=Keys())]
        options: dict[str, Any] = {"mode": "extend-attention", "token_budget": 64}
        expected = answers(make_rig(fake_config(pages=64), **options), calls)
        rig = make_rig(fake_config(pages=64), speculation=ALONE, drafts=0.0, **options)
        assert answers(rig, calls) == expected


SAMPLES: dict[str, Any] = {
    "mode": "extend-attention",
    "token_budget": 64,
    "loop_sizes": (1, 2, 4, 8),
    "sample_sizes": (1, 2, 4, 8),
}


def queued_by(rig: Rig, calls: list[GenerateCall]) -> list[tuple[str, int]]:
    """The entries that are queued, each with the number of those in flight before it."""
    submit, queued = rig.program.submit, []

    def watched(entry: str, arguments: Any) -> Any:
        queued.append((entry, len(rig.program.in_flight)))
        return submit(entry, arguments)

    rig.program.submit = watched  # type: ignore[method-assign]
    answers(rig, calls)
    return queued


def test_a_draft_and_its_check_are_queued_at_once() -> None:
    rig = make_rig(fake_config(pages=64), speculation=ALONE, drafts=0.0, **SAMPLES)
    queued = queued_by(rig, [call(str(i), [i, *PROMPT[:9]], 4) for i in range(3)])
    rounds = [("draft_bs4", 0), ("draft_bs4", 1)]
    assert queued[:5] == [("extend", 0), ("sample_bs4", 1), *rounds, ("extend", 2)]
    assert [number for _, number in queued[5:]] == [3, 4, 5], "draws, and the first round of the next draft"


def test_the_next_draft_is_queued_with_the_check_of_the_last() -> None:
    """So the device never waits for the host, but after the first step."""
    options = SAMPLES | {"token_budget": 12}
    rig = make_rig(fake_config(pages=64), speculation=ALONE, drafts=0.0, **options)
    queued = queued_by(rig, [call(str(i), [i, *PROMPT[:9]], 30) for i in range(3)])
    idle = [number for number, (_, in_flight) in enumerate(queued) if not in_flight]
    assert idle[-1] < len(queued) / 4, queued
    assert counts(rig)[0] == counts(rig)[1] > 50


@pytest.mark.parametrize("ends", ["abort", "stop"])
def test_drafts_for_requests_that_have_ended_are_dropped(ends: str) -> None:
    rig = make_rig(fake_config(pages=64), speculation=ALONE, drafts=0.0, **SAMPLES)
    rig.engine.add(call("a", PROMPT[:9], 40))
    while not rig.engine.stats().speculation.accepted:  # type: ignore[union-attr]
        rig.engine.step()
    assert rig.program.in_flight, "the next draft is queued"
    if ends == "abort":
        rig.engine.abort("a")
    else:
        while rig.engine.has_work:
            rig.engine.step()
        assert not rig.program.in_flight
    assert rig.cache.usage().leased == 0
    assert answers(rig, [call("b", PROMPT[:5], 20)]) == answers(
        make_rig(fake_config(pages=64), **SAMPLES), [call("b", PROMPT[:5], 20)]
    )


@pytest.mark.parametrize("depth", [0, 2])
def test_a_draft_that_fails_ends_no_request(depth: int) -> None:
    """The batch that is queued after it fails with it, and is computed again; then no more is drafted."""
    calls = [call(str(i), [i, *PROMPT[:9]], 20) for i in range(3)]
    config = fake_config(pages=64)
    expected = answers(make_rig(config, depth=depth, **SAMPLES), calls)
    rig = make_rig(config, speculation=ALONE, drafts=0.0, depth=depth, **SAMPLES)
    make_faulty(rig, faults=[*range(100)], spoiled=[])
    assert answers(rig, calls) == expected
    stats = rig.engine.stats()
    assert stats.failed_invocations == 0
    assert stats.preemptions == MAX_FAILURES * len(calls)
    assert [name for name, _ in rig.program.calls].count("draft_bs4") <= 2 * MAX_FAILURES * HIDDEN_PER_SLOT


def test_no_round_passes_the_end_of_the_context() -> None:
    """Rounds for others would: a request without them is proposed nothing."""
    config = fake_config(pages=64)
    near_end = call("a", [*range(30), *range(26)], config.max_seq_len - 56)
    calls = [near_end, call("b", PROMPT[:9], 40)]
    rig = make_rig(config, speculation=ALONE, drafts=0.0, **SAMPLES)
    run_draft = rig.program._run_draft

    def watched(arguments: Any) -> Any:
        result = run_draft(arguments)
        assert arguments["positions"].max() <= config.max_seq_len
        return result

    rig.program._run_draft = watched  # type: ignore[method-assign]
    learn, learnt = LlmTaskInput.learn, []

    def noted(task: LlmTaskInput, token_id: int | None) -> None:
        learnt.append(token_id)
        learn(task, token_id)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlmTaskInput, "learn", noted)
        assert answers(rig, calls) == answers(make_rig(config, **SAMPLES), calls)
    assert None in learnt
    assert rig.engine.stats().speculation.accepted > 20  # type: ignore[union-attr]


def test_the_device_checks_drafted_tokens_only() -> None:
    """It does not know those of a lookup; from another token than the host, it would write others' pages."""
    options = SAMPLES | {"repeats": 0.6}
    calls = [call(str(i), [i, *PROMPT[:9]], 40) for i in range(4)]
    for errs in (0.0, 0.3, 1.0):
        speculation = SpeculationOptions(max_tokens=3, row_cost=0)
        rig = make_rig(fake_config(pages=64), speculation=speculation, drafts=errs, **options)
        assert answers(rig, calls) == answers(make_rig(fake_config(pages=64), **options), calls)
        assert not rig.program.misuse
