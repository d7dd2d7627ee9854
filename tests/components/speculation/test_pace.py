from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.speculation.pace import HELD, TRIALS, UNTIMED, Pace, Paces

TRIED = TRIALS[True] + TRIALS[False]


def kinds(pace: Pace, seconds: dict[bool, float], steps: int, tokens: tuple[int, int] = (3, 1)) -> list[bool]:
    """Return which of so many steps proposed; steps with proposals yield the first of `tokens`."""
    found = []
    for _ in range(steps):
        found.append(pace.proposes)
        pace.observe(seconds[pace.proposes], tokens[not pace.proposes])
    return found


@given(st.floats(0.001, 100), st.floats(0.001, 100), st.integers(1, 9))
def test_the_kind_with_the_shorter_time_per_token_is_held(
    proposing: float, plain: float, tokens: int
) -> None:
    found = kinds(Pace(), {True: proposing, False: plain}, TRIED + HELD - UNTIMED, (tokens, 1))
    assert found[:TRIED] == [True] * TRIALS[True] + [False] * TRIALS[False]
    if abs(proposing / tokens / plain - 1) > 1e-6:
        assert set(found[TRIED + 1 :]) == {proposing / tokens < plain}


@given(st.booleans(), st.floats(1.01, 5))
def test_the_slower_kind_is_tried_again_for_a_few_of_many_steps(proposes: bool, slower: float) -> None:
    found = kinds(Pace(), {proposes: 1.0, not proposes: slower}, 20 * HELD, (1, 1))
    assert found.count(proposes) > 0.96 * len(found)


@given(st.floats(1.2, 5), st.booleans())
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
        pace.observe(0.0, count)


def test_the_first_steps_after_a_change_are_not_timed() -> None:
    pace = Pace()
    kinds(pace, {True: 1.0, False: 1.0}, TRIALS[True], (1, 1))
    for _ in range(UNTIMED):  # they were queued before
        pace.observe(100.0, 1)
    found = kinds(pace, {True: 1.0, False: 0.9}, TRIALS[False] - UNTIMED + 10, (1, 1))
    assert not any(found)


def test_ranges_of_requests_have_their_own_pace() -> None:
    paces = Paces()
    kinds(paces.of(5), {True: 2.0, False: 1.0}, TRIED, (1, 1))
    assert not paces.of(4).proposes
    assert not paces.of(7).proposes
    assert paces.of(3).proposes
    assert paces.of(8).proposes
