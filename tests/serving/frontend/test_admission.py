from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.contract.errors import OverloadedError
from shortfin_apps.llm.serving.frontend.admission import MAX_WAIT_S, Admission
from tests.components.engine_fixture import call
from tests.components.stepped_engine import SteppedClock


def admission(max_requests: int = 100, max_queue_tokens: int = 100) -> tuple[Admission, SteppedClock]:
    clock = SteppedClock()
    return Admission(max_requests=max_requests, max_queue_tokens=max_queue_tokens, clock=clock), clock


def refused(target: Admission, num_tokens: int) -> float:
    with pytest.raises(OverloadedError) as caught:
        target.enter(call("refused", [1] * num_tokens))
    return caught.value.retry_after_s


def test_places_are_given_back_when_answered() -> None:
    target, _ = admission(max_requests=2)
    target.enter(call("a", [1]))
    target.enter(call("b", [1]))
    refused(target, 1)
    target.prefilled("a")
    refused(target, 1)
    target.leave("a")
    target.enter(call("c", [1]))


def test_tokens_are_given_back_with_the_first_token_or_the_answer() -> None:
    target, _ = admission(max_queue_tokens=10)
    target.enter(call("a", [1] * 6))
    refused(target, 5)
    target.enter(call("b", [1] * 4))
    refused(target, 1)
    target.prefilled("a")
    target.prefilled("a")  # its second token changes nothing
    refused(target, 7)
    target.enter(call("c", [1] * 6))
    target.leave("b")
    target.leave("a")
    target.enter(call("d", [1] * 4))
    refused(target, 1)


def test_a_prompt_longer_than_the_queue_is_admitted_alone() -> None:
    target, _ = admission(max_queue_tokens=10)
    target.enter(call("long", [1] * 50))
    refused(target, 1)
    target.prefilled("long")
    target.enter(call("short", [1]))
    refused(target, 50)


def test_a_call_that_resumes_is_admitted_and_counts_no_tokens() -> None:
    target, _ = admission(max_requests=1, max_queue_tokens=10)
    target.enter(call("a", [1] * 10))
    target.enter(replace(call("b", [1] * 10), resumes=True))
    target.leave("b")
    assert refused(target, 1) == 1.0


def test_retry_after_follows_from_the_rate_of_answers() -> None:
    target, clock = admission(max_requests=10)
    for index in range(10):
        target.enter(call(str(index), [1]))
    assert refused(target, 1) == 1.0, "nothing is known yet"
    for index in range(5):
        clock.now_s += 7.0
        target.leave(str(index))
        target.enter(call(f"{index} again", [1]))
    assert refused(target, 1) == pytest.approx(7.0)


def test_retry_after_follows_from_the_rate_of_prefills() -> None:
    target, clock = admission(max_queue_tokens=200)
    for index in range(20):
        target.enter(call(str(index), [1] * 10))
    for index in range(10):
        clock.now_s += 2.0
        target.prefilled(str(index))
        target.enter(call(f"{index} again", [1] * 10))
    assert refused(target, 20) == pytest.approx(4.0)
    clock.now_s += 1000.0
    target.prefilled("10")
    target.enter(call("more", [1] * 10))
    assert refused(target, 200) == MAX_WAIT_S


def test_an_idle_pause_does_not_lower_the_rate() -> None:
    target, clock = admission(max_requests=1)
    for index in range(3):
        target.enter(call(str(index), [1]))
        clock.now_s += 50.0
        target.leave(str(index))
    target.enter(call("a", [1]))
    assert refused(target, 1) == 1.0


@given(st.lists(st.tuples(st.sampled_from("epl"), st.integers(1, 60)), max_size=60))
def test_the_bounds_hold_and_nothing_is_lost(steps: list[tuple[str, int]]) -> None:
    target, _ = admission(max_requests=4)
    waiting: dict[str, int] = {}
    prefilled: set[str] = set()
    for index, (kind, number) in enumerate(steps):
        names = sorted(waiting | dict.fromkeys(prefilled, 0))
        if kind == "e":
            fits = len(names) < 4 and (not waiting or sum(waiting.values()) + number <= 100)
            try:
                target.enter(call(str(index), [1] * number))
                assert fits
                waiting[str(index)] = number
            except OverloadedError:
                assert not fits
        elif names:
            name = names[number % len(names)]
            waiting.pop(name, None)
            prefilled.discard(name)
            if kind == "p":
                target.prefilled(name)
                prefilled.add(name)
            else:
                target.leave(name)
    for name in [*waiting, *prefilled]:
        target.leave(name)
    target.enter(call("all", [1] * 100))
