from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.restart_delay import LONGEST_S, STABLE_S, RestartDelay


def test_delays_double_up_to_the_longest() -> None:
    delay = RestartDelay()
    assert [delay.after(0.1) for _ in range(8)] == [0, 1, 2, 4, 8, 16, 30, 30]


def test_a_long_run_is_forgiven() -> None:
    delay = RestartDelay()
    assert [delay.after(s) for s in (1, 1, 1, STABLE_S, 1, 1)] == [0, 1, 2, 0, 1, 2]


@given(st.lists(st.floats(0, 2 * STABLE_S), max_size=40))
def test_delays_are_bounded_and_none_after_long_runs(runs: list[float]) -> None:
    delay = RestartDelay()
    for ran_s in runs:
        wait_s = delay.after(ran_s)
        assert 0 <= wait_s <= LONGEST_S
        assert ran_s < STABLE_S or wait_s == 0
