from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.batching.fair_share import MAX_REMEMBERED, FairShare


def next_of(share: FairShare, tenants: list[str]) -> str:
    return min(tenants, key=share.rank)


def served(share: FairShare, tenants: list[str], turns: int, tokens: int = 1) -> list[str]:
    order = []
    for _ in range(turns):
        order.append(next_of(share, tenants))
        share.charge(order[-1], tokens)
    return order


def test_weights_are_shares_of_the_service() -> None:
    share = FairShare({"a": 3.0})
    share.enter("a")
    share.enter("b")
    order = served(share, ["a", "b"], 40)
    assert (order.count("a"), order.count("b")) == (30, 10)


def test_a_tenant_that_comes_late_is_next_but_gets_no_credit_for_its_absence() -> None:
    share = FairShare()
    share.enter("a")
    served(share, ["a"], 1000)
    share.enter("b")
    share.charge("a", 1)  # it always has a running request
    assert served(share, ["a", "b"], 10) == ["b", "a"] * 5


def test_service_while_nobody_waits_is_not_charged() -> None:
    share = FairShare()
    share.enter("a")
    served(share, ["a"], 1000)
    share.leave("a")
    share.charge("a", 1000)  # nobody waits
    share.enter("b")
    share.enter("a")
    assert sorted(served(share, ["a", "b"], 2)) == ["a", "b"]


def test_a_short_absence_does_not_reset_the_counter() -> None:
    share = FairShare()
    share.enter("big")
    share.enter("small")
    share.charge("big", 100)
    share.leave("big")
    share.charge("big", 50)  # by requests that still run
    share.enter("big")
    assert served(share, ["big", "small"], 17, tokens=10) == ["small"] * 16 + ["big"]


def test_service_to_a_tenant_that_does_not_wait_is_counted_while_others_wait() -> None:
    share = FairShare()
    share.enter("waits")
    share.charge("runs", 30)
    share.enter("runs")
    assert served(share, ["runs", "waits"], 5, tokens=10) == ["waits", "waits", "waits", "waits", "runs"]


def test_a_sequence_of_new_tenants_starves_nobody() -> None:
    share = FairShare()
    share.enter("a")
    share.enter("first")
    share.charge("a", 50)
    turns = 0
    newest = "first"
    while next_of(share, ["a", newest]) != "a":
        share.charge(newest, 10)
        share.leave(newest)
        turns += 1
        newest = f"new {turns}"
        share.enter(newest)
        assert turns < 20


def test_counters_of_absent_tenants_are_dropped() -> None:
    share = FairShare()
    share.enter("waits")
    for index in range(2 * MAX_REMEMBERED):
        share.enter(str(index))
        share.charge(str(index), 1)
        share.leave(str(index))
    assert len(share._others) == MAX_REMEMBERED
    share.leave("waits")
    assert not share._others


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 5.0]), min_size=2, max_size=5),
    sizes=st.lists(st.integers(1, 50), min_size=5, max_size=5),
)
def test_counters_of_waiting_tenants_differ_by_at_most_one_request(
    weights: list[float], sizes: list[int]
) -> None:
    names = [str(index) for index in range(len(weights))]
    share = FairShare(dict(zip(names, weights, strict=True)))
    for name in names:
        share.enter(name)
    bound = max(size / weight for size, weight in zip(sizes, weights, strict=False))
    for _ in range(100):
        name = next_of(share, names)
        share.charge(name, sizes[int(name)])
        services = [share.rank(other)[0] for other in names]
        assert max(services) - min(services) <= bound + 1e-6
