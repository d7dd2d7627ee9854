"""KV cache without sharing: `--prefix-cache none`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from shortfin_apps.llm.components.kvcache.base import CachedNode, CacheUsage, KVCache, Lease, WindowOptions
from shortfin_apps.llm.components.kvcache.page_pool import PagePool
from shortfin_apps.llm.components.kvcache.window_pages import WindowPages


class BaseCache(KVCache):
    """A cache in which every page belongs to one lease."""

    def __init__(self, num_pages: int, stride: int, window: WindowOptions | None = None) -> None:
        if stride < 1:
            raise ValueError(f"A page of {stride} tokens holds nothing; use a stride of 1 or more.")
        self.stride = stride
        self._pool = PagePool(num_pages)
        self._windows = None if window is None else WindowPages(window, stride)
        self._leases: set[Lease] = set()
        self.suspects, self.window_suspects = set(), set()

    def acquire(self, token_ids: Sequence[int], cache_salt: str | None = None) -> Lease:
        lease = Lease(window_page_ids=None if self._windows is None else [])
        self._leases.add(lease)
        return lease

    def match_length(self, token_ids: Sequence[int], cache_salt: str | None = None) -> int:
        return 0

    def reserve(self, lease: Lease, num_tokens: int, window_tokens: int | None = None) -> bool:
        missing = self._num_missing(lease.page_ids, num_tokens)
        missing_windows = self._num_missing(
            lease.window_page_ids, num_tokens if window_tokens is None else window_tokens
        )
        if not missing and not missing_windows:
            return True
        assert lease in self._leases, "a released lease cannot grow"
        if self._windows is not None and missing_windows > self._windows.num_available:
            return False
        page_ids = self._allocate(missing)
        if page_ids is None:
            return False
        lease.page_ids += page_ids
        if self._windows is not None and lease.window_page_ids is not None:
            lease.window_page_ids += self._windows.allocate(missing_windows)
        return True

    def publish(self, lease: Lease, token_ids: Sequence[int], num_computed: int | None = None) -> None:
        self.give_up(lease, len(token_ids) if num_computed is None else num_computed)

    def give_up(self, lease: Lease, num_computed: int) -> None:
        if self._windows is not None:
            freed = self._windows.give_up(lease, num_computed)
            self.window_suspects.update(freed if lease.is_suspect else ())

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
        if self._windows is not None:
            freed = self._windows.give_up_all(lease)
            self.window_suspects.update(freed if lease.is_suspect else ())
        lease.page_ids.clear()
        lease.num_shared_pages = 0

    def usage(self) -> CacheUsage:
        total, free, cached = self._pool.total, self._pool.num_free, self._num_evictable()
        return CacheUsage(total=total, free=free, cached=cached, leased=total - free - cached)

    def window_usage(self) -> CacheUsage | None:
        return None if self._windows is None else self._windows.usage()

    def cached_page_ids(self) -> list[int]:
        return []

    def cached_window_page_ids(self) -> list[int]:
        return [] if self._windows is None else self._windows.cached_page_ids()

    def flush(self) -> int:
        return 0

    def check_integrity(self) -> None:
        self._pool.check_integrity()
        references = self._count_references()
        for page_id in range(self._pool.num_pages):
            owned, counted = references[page_id], self._pool.references(page_id)
            assert owned == counted, f"page {page_id} has {owned} owners and {counted} references"
        if self._windows is not None:
            self._windows.check_integrity(self._leases, self._nodes())

    def _num_missing(self, page_ids: list[int] | None, num_tokens: int) -> int:
        """Number of pages missing from the table for `num_tokens` tokens; 0 if there is no table."""
        return 0 if page_ids is None else max(0, -(-num_tokens // self.stride) - len(page_ids))

    def _nodes(self) -> Iterable[CachedNode]:
        """Nodes that may keep window pages in addition to the leases."""
        return ()

    def _allocate(self, count: int) -> list[int] | None:
        return self._pool.allocate(count)

    def _free_pages(self, lease: Lease) -> None:
        for page_id in lease.page_ids:
            self._pool.release(page_id)

    def _num_evictable(self) -> int:
        return 0

    def _count_references(self) -> Counter[int]:
        """References to each page, recounted from the owners."""
        return Counter(page_id for lease in self._leases for page_id in lease.page_ids)
