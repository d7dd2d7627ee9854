from __future__ import annotations

import pytest

from shortfin_apps.llm.components.kvcache import SCRATCH_PAGE, CacheUsage, Lease, make_cache
from shortfin_apps.llm.components.kvcache.cache import KVCache

STRIDE = 4


@pytest.fixture
def cache() -> KVCache:
    return KVCache(num_pages=9, stride=STRIDE)


def test_pages_are_reserved_as_the_request_grows(cache: KVCache) -> None:
    lease = cache.acquire(range(5))
    assert lease.page_ids == []
    for num_tokens, pages in [(0, 0), (1, 1), (4, 1), (5, 2), (3, 2), (8, 2), (9, 3)]:
        assert cache.reserve(lease, num_tokens)
        assert len(lease.page_ids) == pages
    assert cache.usage() == CacheUsage(total=8, free=5, cached=0, leased=3)


def test_a_reservation_is_all_or_nothing(cache: KVCache) -> None:
    lease = cache.acquire(range(40))
    assert cache.reserve(lease, 2 * STRIDE)
    before = list(lease.page_ids)
    assert not cache.reserve(lease, 9 * STRIDE)
    assert lease.page_ids == before
    assert cache.usage().free == 6


def test_shares_nothing(cache: KVCache) -> None:
    first = cache.acquire(range(8))
    assert cache.reserve(first, 8)
    cache.publish(first, range(8))
    second = cache.acquire(range(8))
    assert second.num_cached_tokens == first.num_shared_pages == cache.match_length(range(8)) == 0
    assert cache.flush() == 0


def test_double_release_is_harmless(cache: KVCache) -> None:
    first, second = cache.acquire(range(4)), cache.acquire(range(4))
    assert cache.reserve(first, 4)
    cache.release(first)
    assert cache.reserve(second, 4)  # gets the page that `first` had
    cache.release(first)
    cache.check_integrity()
    assert cache.usage().leased == 1
    assert first.released
    assert first.page_ids == []


def test_a_released_lease_cannot_grow(cache: KVCache) -> None:
    lease = cache.acquire(range(4))
    cache.release(lease)
    with pytest.raises(AssertionError):
        cache.reserve(lease, 1)


def test_crossing_pages_leaks_none(cache: KVCache) -> None:
    """Upstream loses one page for every request that crosses a page while decoding."""
    for _ in range(100):
        lease = cache.acquire(range(3))
        for num_tokens in range(3, 4 * STRIDE):
            assert cache.reserve(lease, num_tokens)
        cache.release(lease)
        cache.check_integrity()
    assert cache.usage().free == cache.usage().total


def test_page_0_is_never_handed_out(cache: KVCache) -> None:
    lease = cache.acquire(range(4))
    assert cache.reserve(lease, 8 * STRIDE)
    assert SCRATCH_PAGE not in lease.page_ids
    assert not cache.reserve(lease, 8 * STRIDE + 1)


def test_a_page_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="stride of 1 or more"):
        make_cache("none", num_pages=4, stride=0)


def test_check_integrity_detects_a_lost_lease(cache: KVCache) -> None:
    lease = cache.acquire(range(4))
    assert cache.reserve(lease, 4)
    stolen = Lease(page_ids=lease.page_ids)
    cache.check_integrity()
    cache._leases.add(stolen)
    with pytest.raises(AssertionError, match="2 owners and 1 references"):
        cache.check_integrity()
