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


def test_who_comes_late_is_next_and_not_owed_the_past() -> None:
    share = FairShare()
    share.enter("a")
    served(share, ["a"], 1000)
    share.enter("b")
    share.charge("a", 1)  # it always has something running
    assert served(share, ["a", "b"], 10) == ["b", "a"] * 5


def test_who_runs_alone_does_not_pay_for_it_later() -> None:
    share = FairShare()
    share.enter("a")
    served(share, ["a"], 1000)
    share.leave("a")
    share.charge("a", 1000)  # nobody waits
    share.enter("b")
    share.enter("a")
    assert sorted(served(share, ["a", "b"], 2)) == ["a", "b"]


def test_going_away_for_a_moment_settles_no_account() -> None:
    share = FairShare()
    share.enter("big")
    share.enter("small")
    share.charge("big", 100)
    share.leave("big")
    share.charge("big", 50)  # what still runs
    share.enter("big")
    assert served(share, ["big", "small"], 17, tokens=10) == ["small"] * 16 + ["big"]


def test_what_runs_while_others_wait_is_counted() -> None:
    share = FairShare()
    share.enter("waits")
    share.charge("runs", 30)
    share.enter("runs")
    assert served(share, ["runs", "waits"], 5, tokens=10) == ["waits", "waits", "waits", "waits", "runs"]


def test_a_stream_of_new_names_starves_nobody() -> None:
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


def test_names_that_do_not_come_back_are_forgotten() -> None:
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
def test_backlogged_tenants_are_never_further_apart_than_their_requests(
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
