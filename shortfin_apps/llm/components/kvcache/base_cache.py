"""KV cache that shares no pages: `--prefix-cache none`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shortfin_apps.llm.components.kvcache.base import CacheUsage, KVCache, Lease
from shortfin_apps.llm.components.kvcache.page_pool import PagePool


class BaseCache(KVCache):
    """A cache in which every page belongs to one lease."""

    def __init__(self, num_pages: int, stride: int) -> None:
        if stride < 1:
            raise ValueError(f"A page of {stride} tokens holds nothing; use a stride of 1 or more.")
        self.stride = stride
        self._pool = PagePool(num_pages)
        self._leases: set[Lease] = set()
        self.suspects = set()

    def acquire(self, token_ids: Sequence[int], cache_salt: str | None = None) -> Lease:
        lease = Lease()
        self._leases.add(lease)
        return lease

    def match_length(self, token_ids: Sequence[int], cache_salt: str | None = None) -> int:
        return 0

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        missing = -(-num_tokens // self.stride) - len(lease.page_ids)
        if missing <= 0:
            return True
        assert lease in self._leases, "a released lease cannot grow"
        page_ids = self._allocate(missing)
        if page_ids is None:
            return False
        lease.page_ids += page_ids
        return True

    def publish(self, lease: Lease, token_ids: Sequence[int], num_computed: int | None = None) -> None:
        pass

    def retract(self, lease: Lease) -> None:
        pass

    def release(self, lease: Lease) -> None:
        if lease.released:
            return
        self._leases.remove(lease)
        lease.released = True
        self._free_pages(lease)
        if lease.is_suspect:
            self.suspects.update(page_id for page_id in lease.page_ids if not self._pool.references(page_id))
        lease.page_ids.clear()
        lease.num_shared_pages = 0

    def usage(self) -> CacheUsage:
        total, free, cached = self._pool.total, self._pool.num_free, self._num_evictable()
        return CacheUsage(total=total, free=free, cached=cached, leased=total - free - cached)

    def flush(self) -> int:
        return 0

    def check_integrity(self) -> None:
        self._pool.check_integrity()
        references = self._count_references()
        for page_id in range(self._pool.num_pages):
            owned, counted = references[page_id], self._pool.references(page_id)
            assert owned == counted, f"page {page_id} has {owned} owners and {counted} references"

    def _allocate(self, count: int) -> list[int] | None:
        return self._pool.allocate(count)

    def _free_pages(self, lease: Lease) -> None:
        for page_id in lease.page_ids:
            self._pool.release(page_id)

    def _num_evictable(self) -> int:
        return 0

    def _count_references(self) -> Counter[int]:
        """References to each page, recounted from their owners."""
        return Counter(page_id for lease in self._leases for page_id in lease.page_ids)
