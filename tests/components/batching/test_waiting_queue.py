from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.batching.fair_share import FairShare
from shortfin_apps.llm.components.batching.waiting_queue import PRIORITY_STEP_S, WaitingQueue
from shortfin_apps.llm.components.request.messages import Terms
from shortfin_apps.llm.components.request.request import Request
from tests.components.engine_fixture import call


def request(
    name: str, *, arrival_s: float = 0.0, priority: int = 0, tenant: str = "", tokens: int = 1
) -> Request:
    terms = Terms(priority=priority, tenant=tenant)
    return Request(call(name, [1] * tokens, terms=terms), arrival_s=arrival_s)


def queue_of(*requests: Request) -> WaitingQueue:
    queue = WaitingQueue(FairShare())
    for one in requests:
        queue.add(one)
    return queue


def names(queue: WaitingQueue) -> list[str]:
    return [one.request_id for one in queue]


def test_first_come_first_served() -> None:
    assert names(queue_of(*(request(str(i)) for i in range(5)))) == list("01234")


def test_lower_priority_values_come_first() -> None:
    queue = queue_of(request("late", priority=2), request("now", priority=-1), request("normal"))
    assert names(queue) == ["now", "normal", "late"]


@given(
    st.lists(st.tuples(st.floats(0, 1000), st.integers(-100, 100)), min_size=2, max_size=20),
)
def test_a_priority_step_is_worth_a_fixed_number_of_seconds(arrivals: list[tuple[float, int]]) -> None:
    arrivals.sort()
    queue = queue_of(*(request(str(i), arrival_s=at, priority=p) for i, (at, p) in enumerate(arrivals)))
    order = [arrivals[int(name)] for name in names(queue)]
    for index, (arrival_s, priority) in enumerate(order):
        for later_s, higher in order[:index]:
            assert later_s - arrival_s <= (priority - higher) * PRIORITY_STEP_S + 1e-6


def test_tenants_take_turns_however_many_requests_they_have() -> None:
    many = [request(f"a{i}", tenant="a") for i in range(5)]
    queue = queue_of(*many, request("b0", tenant="b"), request("b1", tenant="b"))
    assert names(queue) == ["a0", "b0", "a1", "b1", "a2", "a3", "a4"]


def test_tenants_share_by_tokens_and_not_by_requests() -> None:
    longs = [request(f"a{i}", tenant="a", tokens=3) for i in range(2)]
    shorts = [request(f"b{i}", tenant="b") for i in range(4)]
    assert names(queue_of(*longs, *shorts)) == ["a0", "b0", "b1", "b2", "a1", "b3"]


def test_preempted_requests_are_first() -> None:
    queue = queue_of(request("a", priority=-100))
    queue.add_first(request("younger", tenant="b", priority=9))
    queue.add_first(request("youngest"))
    assert names(queue) == ["youngest", "younger", "a"]


def test_removing_an_unknown_request_is_an_error() -> None:
    queue = queue_of(request("a"))
    with pytest.raises(ValueError, match="not in list"):
        queue.remove(request("b"))
    with pytest.raises(ValueError, match="not in list"):
        queue.remove(request("c", tenant="t"))
    assert len(queue) == 1


@given(st.data())
def test_removing_during_iteration_skips_and_repeats_no_request(data: st.DataObject) -> None:
    tenants = data.draw(st.lists(st.sampled_from("abc"), max_size=15))
    requests = [request(str(i), tenant=tenant) for i, tenant in enumerate(tenants)]
    queue = queue_of(*requests)
    for one in requests[:: data.draw(st.integers(2, 4))]:
        queue.remove(one)
        queue.add_first(one)
    seen, kept = [], []
    for one in queue:
        seen.append(one)
        if data.draw(st.booleans()):
            queue.remove(one)
        else:
            kept.append(one)
    assert sorted(map(id, seen)) == sorted(map(id, requests))
    assert sorted(map(id, queue)) == sorted(map(id, kept))
    assert len(queue) == len(kept)


def test_counts_are_of_all_that_wait() -> None:
    queue = queue_of(request("a0", tenant="a"), request("a1", tenant="a"), request("b0", tenant="b"))
    queue.add_first(request("b1", tenant="b"))
    assert queue.counts() == {"a": 2, "b": 2}
    for one in list(queue):
        queue.remove(one)
    assert not queue.counts()
