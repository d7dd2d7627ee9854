from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.speculation.pace import CLEARLY, HELD, TRIALS, UNTIMED, Pace, Paces

TRIED = TRIALS[True] + TRIALS[False]


def kinds(pace: Pace, seconds: dict[bool, float], steps: int, tokens: tuple[int, int] = (3, 1)) -> list[bool]:
    """Return which of so many steps proposed; steps with proposals yield the first of `tokens`."""
    found = []
    for _ in range(steps):
        kind = pace.proposes
        found.append(kind)
        pace.observe(seconds[kind], tokens[not kind], has_proposals=kind)
    return found


@given(st.floats(0.001, 100), st.floats(0.001, 100), st.integers(1, 9))
def test_the_kind_with_the_shorter_time_per_token_is_held(
    proposing: float, plain: float, tokens: int
) -> None:
    found = kinds(Pace(), {True: proposing, False: plain}, TRIED + HELD - UNTIMED, (tokens, 1))
    assert found[:TRIED] == [True] * TRIALS[True] + [False] * TRIALS[False]
    if abs(proposing / tokens / plain / CLEARLY - 1) > 1e-6:
        assert set(found[TRIED + 1 :]) == {proposing / tokens < CLEARLY * plain}


@given(st.booleans(), st.floats(1.1, 5))
def test_the_slower_kind_is_tried_again_for_a_few_of_many_steps(proposes: bool, slower: float) -> None:
    found = kinds(Pace(), {proposes: 1.0, not proposes: slower}, 40 * HELD, (1, 1))
    assert found.count(proposes) > 0.96 * len(found)


@given(st.floats(1.2, 50), st.booleans())
def test_a_kind_that_becomes_faster_is_found(faster: float, proposes: bool) -> None:
    pace, seconds = Pace(), {proposes: 1.0, not proposes: faster}
    kinds(pace, seconds, 3 * HELD, (1, 1))
    found = kinds(pace, {proposes: faster, not proposes: 1.0}, 3 * HELD, (1, 1))
    assert found[-HELD:].count(proposes) <= TRIALS[True]


@given(st.lists(st.integers(0, 5), max_size=3 * HELD))
def test_without_times_proposals_go_on(tokens: list[int]) -> None:
    pace = Pace()
    for count in tokens:
        assert pace.proposes
        pace.observe(0.0, count, has_proposals=True)


@given(st.lists(st.floats(0.001, 100), max_size=3 * HELD))
def test_steps_without_proposals_are_no_reason_to_end_these(seconds: list[float]) -> None:
    """There was nothing to propose, or a draft model caught up."""
    pace = Pace()
    for step_s in seconds:
        pace.observe(step_s, 1, has_proposals=False)
    assert pace.proposes


@given(st.lists(st.floats(0.97, 1.03), min_size=3 * HELD, max_size=3 * HELD))
def test_noise_ends_no_proposals(noise: list[float]) -> None:
    """Steps of both kinds take as long, but for 3 %."""
    pace, held = Pace(), 0
    for factor in noise:
        held += pace.proposes
        pace.observe(factor, 1, has_proposals=pace.proposes)
    assert held >= len(noise) - 4 * TRIALS[False]


@given(st.integers(0, 4 * HELD), st.floats(100, 1e6))
def test_a_step_that_something_else_delays_decides_nothing(number: int, delayed_s: float) -> None:
    pace, slower = Pace(), {True: 1.0, False: 2.0}
    for step in range(5 * HELD):
        kind = pace.proposes
        pace.observe(delayed_s if step == number else slower[kind], 1, has_proposals=kind)
    found = kinds(pace, slower, HELD, (1, 1))
    assert found.count(True) >= HELD - TRIALS[False]


def test_the_first_steps_after_a_change_are_not_timed() -> None:
    pace = Pace()
    kinds(pace, {True: 1.0, False: 1.0}, TRIALS[True], (1, 1))
    for _ in range(UNTIMED):  # they were queued before
        pace.observe(100.0, 1, has_proposals=False)
    found = kinds(pace, {True: 1.0, False: 0.9}, TRIALS[False] - UNTIMED + 10, (1, 1))
    assert not any(found)


def test_no_choice_lasts_for_ever_where_every_step_has_a_prompt() -> None:
    pace = Pace()
    kinds(pace, {True: 2.0, False: 1.0}, TRIED, (1, 1))
    assert not pace.proposes
    for _ in range(HELD):
        pace.pass_over()
    assert pace.proposes


def test_ranges_of_requests_have_their_own_pace(caplog: pytest.LogCaptureFixture) -> None:
    paces = Paces()
    with caplog.at_level(logging.INFO):
        kinds(paces.of(5), {True: 2.0, False: 1.0}, TRIED, (1, 1))
    assert not paces.of(4).proposes
    assert not paces.of(7).proposes
    assert paces.of(3).proposes
    assert paces.of(8).proposes
    assert "proposals for 4 to 7 requests are off for a while: a token takes 2000.000 ms" in caplog.text
