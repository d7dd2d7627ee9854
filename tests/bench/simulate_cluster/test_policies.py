"""The routers' rules, as their sources state them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from bench.simulate_cluster.policies import (
    POLICIES,
    CacheAware,
    Cells,
    Cluster,
    HashRing,
    LlmD,
    Policy,
    PrefixHash,
    RoundRobin,
    Session,
)
from bench.simulate_cluster.worker import Job, StepTimes, Worker


@pytest.fixture
def cluster() -> Cluster:
    return make_cluster(4)


def make_cluster(num_workers: int) -> Cluster:
    decode_s, mixed_s = StepTimes().tables(256)
    return Cluster([Worker(decode_s, mixed_s, 256, 256, 800_000) for _ in range(num_workers)])


def make(kind: type[Policy], cluster: Cluster) -> Policy:
    return kind(cluster, np.random.default_rng(0))


def job(conversation: int, group: int = 0, prefix: int = 1000, question: int = 100) -> Job:
    return Job(conversation, conversation, group, prefix, prefix + question, 10, 0.0)


def test_round_robin_takes_turns(cluster: Cluster) -> None:
    policy = make(RoundRobin, cluster)
    assert [policy.choose(job(i), 0) for i in range(6)] == [0, 1, 2, 3, 0, 1]


def test_cache_aware_stays_with_the_prefix_while_loads_differ_by_no_more_than_64(cluster: Cluster) -> None:
    policy = make(CacheAware, cluster)
    first = policy.choose(job(0), 0)
    cluster.in_flight[first] = 64
    assert policy.choose(job(1), 0) == first
    cluster.in_flight[first] = 65
    assert policy.choose(job(2), 0) != first
    cluster.in_flight[:] = 131
    cluster.in_flight[first] = 196  # 65 more, but not 1.5 times as many
    assert policy.choose(job(0), 0) == first


def test_cache_aware_needs_three_tenths_of_the_prompt(cluster: Cluster) -> None:
    policy = make(CacheAware, cluster)
    first = policy.choose(job(0, prefix=300, question=700), 0)
    cluster.in_flight[first] = 1
    second = policy.choose(job(1, prefix=300, question=700), 0)
    assert second != first
    cluster.in_flight[second] = 1
    assert policy.choose(job(2, prefix=301, question=699), 0) in {first, second}
    assert policy.choose(job(3, prefix=300, question=700), 0) not in {first, second}


def test_cache_aware_sends_a_conversation_to_the_worker_of_its_last_turn(cluster: Cluster) -> None:
    policy = make(CacheAware, cluster)
    first = policy.choose(job(0), 0)
    cluster.in_flight[first] = 65
    second = policy.choose(job(0, question=200), 0)
    cluster.in_flight[:] = 0
    cluster.in_flight[second] = 30
    assert second != first
    assert policy.choose(job(0, question=300), 0) == second


def test_prefix_hash_passes_on_what_is_over_the_average(cluster: Cluster) -> None:
    policy = make(PrefixHash, cluster)
    home = policy.choose(job(0), 0)
    assert [policy.choose(job(i), 0) for i in range(1, 9)] == [home] * 8
    cluster.in_flight[:] = 4
    assert policy.choose(job(9), 0) == home
    cluster.in_flight[home] = 6  # the average is 4.75 with the one that comes, and 1.25 times that 5.9
    assert policy.choose(job(10), 0) != home


def test_a_session_stays_on_its_worker_whatever_the_load(cluster: Cluster) -> None:
    policy = make(Session, cluster)
    home = policy.choose(job(7), 0)
    cluster.in_flight[home] = 1000
    assert policy.choose(job(7), 0) == home
    assert len({policy.choose(job(i), 0) for i in range(100)}) == 4


def test_a_ring_gives_every_worker_about_its_share_and_moves_few_keys() -> None:
    keys = [f"key-{i}" for i in range(5000)]
    ten, eleven = HashRing(10), HashRing(11)
    counts = Counter(map(ten.worker_of, keys))
    assert max(counts.values()) < 1.5 * 500
    moved = sum(ten.worker_of(key) != eleven.worker_of(key) for key in keys)
    assert 0.05 < moved / len(keys) < 0.14
    assert all(eleven.worker_of(key) == 10 for key in keys if ten.worker_of(key) != eleven.worker_of(key))


def test_llm_d_prefers_the_prefix_and_breaks_ties_at_random(cluster: Cluster) -> None:
    policy = make(LlmD, cluster)
    assert len({policy.choose(job(i, group=i), 0) for i in range(50)}) == 4
    home = policy.choose(job(100, group=99), 0)
    assert {policy.choose(job(101 + i, group=99), 0) for i in range(20)} == {home}


def test_llm_d_weighs_the_longest_queue_and_a_full_cache_against_the_prefix(cluster: Cluster) -> None:
    policy = make(LlmD, cluster)
    home = policy.choose(job(0), 0)
    worker = cluster.workers[home]
    worker.cache.put(0, 700_000, 0, 0, pin=True)
    assert policy.choose(job(1), 1) == home  # 3 * 1000 / 1100 for the prefix, 2 * 0.875 against it
    worker.waiting.extend(job(1000 + i) for i in range(257))
    assert policy.choose(job(2), 1.04) == home  # as last scraped
    assert policy.choose(job(3), 1.06) != home


def test_llm_d_forgets_what_the_worker_has_no_room_for() -> None:
    cluster = make_cluster(1)
    policy = make(LlmD, cluster)
    assert isinstance(policy, LlmD)
    for i in range(1000):
        policy.choose(job(i, group=i), 0)
    scores = [policy._scores(job(5000, group=group), 0)[0] for group in (0, 999)]
    assert scores[0] < scores[1]


@pytest.mark.parametrize("num_workers", [1, 32, 33, 100])
def test_cells_are_of_nearly_equal_size_and_keep_conversations(num_workers: int) -> None:
    cluster = make_cluster(num_workers)
    policy = make(Cells, cluster)
    chosen = [policy.choose(job(i, group=i), 0) for i in range(200)]
    assert [policy.choose(job(i, group=i, question=150), 0) for i in range(200)] == chosen
    assert max(chosen) < num_workers
    assert isinstance(policy, Cells)
    sizes = {len(cell.cluster.workers) for cell in policy._cells}
    assert max(sizes) <= Cells.SIZE
    assert max(sizes) - min(sizes) <= 1


def test_cells_share_the_counts_of_the_whole_cluster() -> None:
    cluster = make_cluster(64)
    policy = make(Cells, cluster)
    assert isinstance(policy, Cells)
    cluster.in_flight[40] = 7
    assert policy._cells[1].cluster.in_flight[8] == 7


@pytest.mark.parametrize("name", POLICIES)
def test_one_worker_gets_everything(name: str) -> None:
    policy = make(POLICIES[name], make_cluster(1))
    assert {policy.choose(job(i, group=i % 3), i) for i in range(20)} == {0}
