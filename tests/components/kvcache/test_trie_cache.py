from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shortfin_apps.llm.components.kvcache import SCRATCH_PAGE, CacheUsage, Lease
from shortfin_apps.llm.components.kvcache.cache import KVCache
from shortfin_apps.llm.components.kvcache.trie_cache import TrieCache

STRIDE = 4


@pytest.fixture
def cache() -> TrieCache:
    return TrieCache(num_pages=9, stride=STRIDE)


def prompt(pages: int, first: int = 0) -> list[int]:
    """A page-aligned prompt; prompts with different `first` share no page."""
    return list(range(1000 * first, 1000 * first + pages * STRIDE))


def start(cache: TrieCache, tokens: Sequence[int], salt: str | None = None) -> Lease:
    lease = cache.acquire(tokens, salt)
    assert cache.reserve(lease, len(tokens))
    return lease


def serve(cache: TrieCache, tokens: Sequence[int], salt: str | None = None) -> Lease:
    """A request whose whole prompt is computed and published."""
    lease = start(cache, tokens, salt)
    cache.publish(lease, tokens)
    return lease


def finish(cache: TrieCache, tokens: Sequence[int], salt: str | None = None) -> list[int]:
    """Serves a request and releases it; returns the pages it had."""
    lease = serve(cache, tokens, salt)
    page_ids = list(lease.page_ids)
    cache.release(lease)
    cache.check_integrity()
    return page_ids


# Matching


def test_a_published_prefix_is_found_by_the_next_request(cache: TrieCache) -> None:
    first = serve(cache, prompt(2))
    second = cache.acquire([*prompt(2), 7, 8])
    assert second.page_ids == first.page_ids
    assert (second.num_cached_tokens, second.num_shared_pages) == (8, 2)
    assert cache.usage() == CacheUsage(total=8, free=6, cached=0, leased=2)


@pytest.mark.parametrize(
    ("length", "matched"), [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 8)]
)
def test_a_match_leaves_a_token_to_compute(cache: TrieCache, length: int, matched: int) -> None:
    finish(cache, prompt(2))
    tokens = prompt(4)[:length]
    assert cache.match_length(tokens) == matched
    assert cache.acquire(tokens).num_cached_tokens == matched


def test_a_page_is_keyed_by_everything_before_it(cache: TrieCache) -> None:
    finish(cache, prompt(1, first=1) + prompt(1))
    assert cache.match_length([*prompt(1, first=2), *prompt(1), 0]) == 0
    assert cache.match_length([*prompt(1), 0]) == 0


def test_salts_share_nothing(cache: TrieCache) -> None:
    salts = [None, "", "a", "b"]
    pages = [finish(cache, prompt(2), salt) for salt in salts]
    assert len({page_id for page_ids in pages for page_id in page_ids}) == 8
    assert [cache.match_length([*prompt(2), 0], salt) for salt in [*salts, "c"]] == [8, 8, 8, 8, 0]


def test_only_full_pages_are_published(cache: TrieCache) -> None:
    lease = serve(cache, prompt(2)[:7])
    assert lease.num_shared_pages == 1
    assert cache.match_length(prompt(3)) == 4


def test_only_computed_tokens_are_published(cache: TrieCache) -> None:
    lease = start(cache, prompt(3))
    for num_computed, pages in [(0, 0), (3, 0), (4, 1), (11, 2), (5, 2), (12, 3)]:
        cache.publish(lease, prompt(3), num_computed)
        assert lease.num_shared_pages == pages
        assert cache.match_length([*prompt(3), 0]) == pages * STRIDE


def test_generated_tokens_are_published(cache: TrieCache) -> None:
    tokens = prompt(1)
    lease = serve(cache, tokens)
    for token in range(50, 50 + 2 * STRIDE):
        tokens.append(token)
        assert cache.reserve(lease, len(tokens))
        cache.publish(lease, tokens)
    cache.release(lease)
    assert cache.match_length([*tokens, 0]) == 3 * STRIDE


class Recorder(list[int]):
    """Tokens that record which slices of them were read."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__(tokens)
        self.read: list[slice] = []

    def __getitem__(self, index: Any) -> Any:
        self.read.append(index)
        return super().__getitem__(index)


def test_publishing_reads_only_the_tokens_of_new_pages(cache: TrieCache) -> None:
    """`publish` is called for every running request in every step, so it must not walk the sequence."""
    tokens = Recorder(prompt(4))
    lease = start(cache, tokens)
    read = []
    for num_computed in range(1, len(tokens) + 1):
        tokens.read.clear()
        cache.publish(lease, tokens, num_computed)
        read.append(list(tokens.read))
    assert read == [[slice(n - STRIDE, n)] if n % STRIDE == 0 else [] for n in range(1, len(tokens) + 1)]


def test_match_length_changes_nothing(cache: TrieCache) -> None:
    finish(cache, prompt(2, first=1))
    finish(cache, prompt(2, first=2))
    cache.match_length([*prompt(2, first=1), 0])
    assert cache.reserve(cache.acquire([]), 5 * STRIDE)  # one page short: the oldest goes
    assert cache.match_length([*prompt(2, first=1), 0]) == 4
    assert cache.match_length([*prompt(2, first=2), 0]) == 8


# Eviction


def test_the_least_recently_released_prompt_is_evicted_first_from_its_last_page(cache: TrieCache) -> None:
    for first in range(4):
        finish(cache, prompt(2, first))
    cache.release(cache.acquire([*prompt(2, first=0), 0]))  # used again, so now the most recent
    grower = cache.acquire([])
    lengths = []
    for pages in range(1, 9):
        assert cache.reserve(grower, pages * STRIDE)
        cache.check_integrity()
        lengths.append([cache.match_length([*prompt(2, first), 0]) for first in (1, 2, 3, 0)])
    assert lengths == [
        [4, 8, 8, 8],
        [0, 8, 8, 8],
        [0, 4, 8, 8],
        [0, 0, 8, 8],
        [0, 0, 4, 8],
        [0, 0, 0, 8],
        [0, 0, 0, 4],
        [0, 0, 0, 0],
    ]


def test_a_reservation_that_fails_evicts_nothing(cache: TrieCache) -> None:
    finish(cache, prompt(4))
    lease = start(cache, prompt(2, first=1))
    assert not cache.reserve(lease, 9 * STRIDE)
    assert cache.usage() == CacheUsage(total=8, free=2, cached=4, leased=2)


def test_flush_evicts_pages_without_a_lease(cache: TrieCache) -> None:
    finish(cache, prompt(3))
    lease = cache.acquire(prompt(3))
    assert cache.flush() == 1
    cache.check_integrity()
    assert cache.match_length(prompt(4)) == 8
    cache.release(lease)
    assert cache.flush() == 2
    assert cache.usage().free == cache.usage().total


# Two requests compute the same tokens at once


def test_the_loser_of_a_publish_race_keeps_its_block_table(cache: TrieCache) -> None:
    winner, loser = start(cache, prompt(2)), start(cache, prompt(2))
    table = list(loser.page_ids)
    cache.publish(winner, prompt(2))
    cache.publish(loser, prompt(2))
    cache.check_integrity()
    assert loser.page_ids == table
    assert loser.num_shared_pages == 2
    assert cache.acquire([*prompt(2), 0]).page_ids == winner.page_ids


def test_the_loser_of_a_publish_race_publishes_what_follows(cache: TrieCache) -> None:
    winner, loser = start(cache, prompt(1)), start(cache, prompt(3))
    cache.publish(winner, prompt(1))
    cache.publish(loser, prompt(3))
    third = cache.acquire([*prompt(3), 0])
    assert third.page_ids == [*winner.page_ids, *loser.page_ids[1:]]


@pytest.mark.parametrize("leaving", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_a_copy_replaces_the_published_page_when_its_last_reader_leaves(
    cache: TrieCache, leaving: tuple[int, ...]
) -> None:
    leases = [start(cache, prompt(2)) for _ in range(3)]
    for lease in leases:
        cache.publish(lease, prompt(2))
    for left, index in enumerate(leaving, start=1):
        cache.release(leases[index])
        cache.check_integrity()
        assert cache.usage().leased == 2 * (3 - left)  # each page held is read by a lease
    assert cache.usage() == CacheUsage(total=8, free=6, cached=2, leased=0)


def test_a_published_page_that_others_read_is_not_replaced(cache: TrieCache) -> None:
    winner, loser = start(cache, prompt(1)), start(cache, prompt(1))
    cache.publish(winner, prompt(1))
    cache.publish(loser, prompt(1))
    reader = cache.acquire([*prompt(1), 0])
    cache.release(winner)
    cache.check_integrity()
    assert cache.acquire([*prompt(1), 0]).page_ids == reader.page_ids


def test_a_computed_page_replaces_a_published_one_without_a_lease(cache: TrieCache) -> None:
    late = start(cache, prompt(2))
    finish(cache, prompt(2))
    cache.publish(late, prompt(2))
    cache.check_integrity()
    assert cache.usage() == CacheUsage(total=8, free=6, cached=0, leased=2)
    assert cache.acquire([*prompt(2), 0]).page_ids == late.page_ids


def test_a_single_running_request_can_have_every_page(cache: TrieCache) -> None:
    """After all others are preempted, the remaining request can grow, whatever they published."""
    winner, loser = start(cache, prompt(4)), start(cache, prompt(4))
    cache.publish(winner, prompt(4))
    cache.publish(loser, prompt(4))
    cache.release(winner)
    assert cache.reserve(loser, 8 * STRIDE)
    assert len(set(loser.page_ids)) == 8


# Faults of upstream, listed with the tests' names


def test_crossing_pages_leaks_none(cache: TrieCache) -> None:
    """Upstream: one page leaks per request that crosses a page."""
    for turn in range(60):
        tokens = prompt(1, first=turn % 3)
        lease = serve(cache, tokens)
        for token in range(10):
            tokens.append(token)
            assert cache.reserve(lease, len(tokens))
            cache.publish(lease, tokens)
        cache.release(lease)
        cache.check_integrity()
    cache.flush()
    assert cache.usage().free == cache.usage().total


def test_a_match_is_not_evicted_by_its_own_request(cache: TrieCache) -> None:
    """Upstream: evicts the page it just matched, and hands it out a second time."""
    (cached,) = finish(cache, prompt(1))
    other = start(cache, prompt(4, first=1))
    lease = cache.acquire([*prompt(1), *range(12)])
    assert lease.page_ids == [cached]
    assert not cache.reserve(lease, 5 * STRIDE)  # only the matched page itself could be evicted
    assert cache.reserve(lease, 4 * STRIDE)
    assert len({*lease.page_ids, *other.page_ids}) == 8
    cache.check_integrity()


def test_page_aligned_prompts_stay_evictable(cache: TrieCache) -> None:
    """Upstream: the node of a page-aligned prompt is never evicted."""
    for first in range(20):
        tokens = prompt(2, first)
        lease = serve(cache, tokens)
        assert cache.reserve(lease, len(tokens) + 1)
        cache.release(lease)
    assert cache.usage().leased == 0
    assert cache.reserve(cache.acquire([]), 8 * STRIDE)


def test_a_release_frees_no_copies_of_others(cache: TrieCache) -> None:
    """Upstream: pages duplicated by concurrent requests are freed by the next release."""
    winner, loser = start(cache, prompt(2)), start(cache, prompt(2))
    cache.publish(winner, prompt(2))
    cache.publish(loser, prompt(2))
    finish(cache, prompt(2, first=1))
    cache.flush()
    rest = cache.acquire([])
    assert cache.reserve(rest, 4 * STRIDE)
    assert len({*winner.page_ids, *loser.page_ids, *rest.page_ids}) == 8


def test_page_0_is_never_handed_out(cache: TrieCache) -> None:
    """Upstream: padding rows write to page 0, and a request owns it."""
    for first in range(8):
        assert SCRATCH_PAGE not in finish(cache, prompt(1, first))
    lease = cache.acquire([])
    assert cache.reserve(lease, 8 * STRIDE)
    assert SCRATCH_PAGE not in lease.page_ids
    assert not cache.reserve(lease, 8 * STRIDE + 1)


def test_double_release_is_harmless(cache: TrieCache) -> None:
    lease = serve(cache, prompt(2))
    reader = cache.acquire([*prompt(2), 0])
    cache.release(lease)
    cache.release(lease)
    cache.check_integrity()
    assert cache.usage().leased == 2
    cache.release(reader)
    cache.release(reader)
    cache.check_integrity()
    assert cache.usage() == CacheUsage(total=8, free=6, cached=2, leased=0)


# What cannot happen


def test_publishing_beyond_the_leases_pages_is_refused(cache: TrieCache) -> None:
    with pytest.raises(AssertionError):
        cache.publish(start(cache, prompt(1)), prompt(2))


def test_another_caches_lease_is_refused(cache: TrieCache) -> None:
    other = KVCache(num_pages=9, stride=STRIDE)
    lease = other.acquire(prompt(1))
    with pytest.raises(AssertionError):
        cache.publish(lease, prompt(1))


def _miscount(cache: TrieCache, lease: Lease) -> None:
    next(cache._nodes()).num_leases += 1


def _lose_an_evictable_page(cache: TrieCache, lease: Lease) -> None:
    cache._unleased.popitem()


def _reverse_the_order_of_eviction(cache: TrieCache, lease: Lease) -> None:
    cache._unleased.move_to_end(next(iter(cache._unleased)))


def _invent_a_copy(cache: TrieCache, lease: Lease) -> None:
    next(cache._nodes()).copies.append(1)


def _lose_a_copy(cache: TrieCache, lease: Lease) -> None:
    next(node for node in cache._nodes() if node.copies).copies.clear()


def _remove_leased_nodes(cache: TrieCache, lease: Lease) -> None:
    cache._root.children.clear()


def _lose_a_reference(cache: TrieCache, lease: Lease) -> None:
    cache._pool.release(lease.page_ids[0])


@pytest.mark.parametrize(
    "damage",
    [
        _miscount,
        _lose_an_evictable_page,
        _reverse_the_order_of_eviction,
        _invent_a_copy,
        _lose_a_copy,
        _remove_leased_nodes,
        _lose_a_reference,
    ],
)
def test_check_integrity_detects(cache: TrieCache, damage: Callable[[TrieCache, Lease], None]) -> None:
    finish(cache, prompt(2, first=1))
    leases = [start(cache, prompt(1)), start(cache, prompt(1))]
    for lease in leases:
        cache.publish(lease, prompt(1))
    cache.check_integrity()
    damage(cache, leases[0])
    with pytest.raises(AssertionError):
        cache.check_integrity()
