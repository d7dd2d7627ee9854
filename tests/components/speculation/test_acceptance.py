"""How many tokens to propose, by what became of those before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.speculation.acceptance import Acceptance, Rate, least_chance

LENGTHS = st.integers(2, 40)


def test_a_token_pays_where_it_yields_more_for_its_row_than_the_invocation_does() -> None:
    """2 decodes beside 8 rows of a prompt, at 0.1 a row: 2 tokens for 2; at q = 0.1, 2.1 tokens for 2.1."""
    assert least_chance(0.1, 2, 10) == pytest.approx(0.1)
    assert least_chance(0.1, 1, 1) < least_chance(0.1, 32, 32) < 1
    assert least_chance(0, 5, 5) == 0


def test_a_token_that_has_to_be_drafted_pays_for_that_too() -> None:
    """A round of 0.4 for 2 requests: with 0.1 a row, 0.6 tokens for 0.6 more, where 2 tokens cost 2."""
    assert least_chance(0.1, 2, 10, 0.4 / 2) == pytest.approx(0.3)


def test_a_rate_begins_with_its_value_and_comes_to_its_prior() -> None:
    rate = Rate(0.8, 0.2)
    assert rate.value == 0.2
    for _ in range(1000):
        rate.pass_over()
    assert rate.value == pytest.approx(0.8, abs=0.01)
    assert Rate(0.3).value == 0.3


@given(length=LENGTHS, least=st.floats(0.01, 1), outcomes=st.lists(st.booleans(), max_size=30))
def test_every_proposed_token_is_likelier_than_the_least_chance(
    length: int, least: float, outcomes: list[bool]
) -> None:
    acceptance = Acceptance()
    for is_right in outcomes:
        acceptance.observe(length, 1, int(is_right))
    rate = acceptance.rate(length)
    assert 0 < rate < 1
    count = acceptance.num_worth(length, least, 8)
    assert count == 8 or rate ** (count + 1) <= least + 1e-12
    assert count == 0 or rate**count > least - 1e-12


@given(length=LENGTHS, num_proposed=st.integers(1, 8), data=st.data())
def test_a_proposal_teaches_as_much_as_its_tokens_one_by_one(
    length: int, num_proposed: int, data: st.DataObject
) -> None:
    num_accepted = data.draw(st.integers(0, num_proposed))
    at_once, singly = Acceptance(), Acceptance()
    at_once.observe(length, num_proposed, num_accepted)
    for _ in range(num_accepted):
        singly.observe(length, 1, 1)
    if num_accepted < num_proposed:
        singly.observe(length, 1, 0)
    assert at_once.rate(length) == pytest.approx(singly.rate(length))


def test_what_is_always_right_is_proposed_in_full_and_what_never_is_not_at_all() -> None:
    right, wrong = Acceptance(), Acceptance()
    for _ in range(60):
        right.observe(2, 4, 4)
        wrong.observe(40, 4, 0)
    assert right.num_worth(2, 0.1, 8) == 8
    assert wrong.num_worth(40, 0.1, 8) == 0


def test_kinds_of_matches_are_known_apart() -> None:
    acceptance = Acceptance()
    before = acceptance.rate(20)
    acceptance.observe(2, 8, 0)
    assert acceptance.rate(20) == before


def test_a_rate_is_tried_again_some_time() -> None:
    acceptance = Acceptance()
    for _ in range(100):
        acceptance.observe(20, 1, 0)
    passed = 0
    while not acceptance.num_worth(20, 0.1, 8):
        acceptance.pass_over(20)
        passed += 1
    assert 10 < passed < 100
