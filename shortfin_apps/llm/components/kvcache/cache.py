"""The KV cache: page accounting, here without prefix sharing (`--prefix-cache none`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import ClassVar

from shortfin_apps.llm.components.kvcache.lease import (
    AvailablePages,
    CachedNode,
    CacheUsage,
    Lease,
    WindowOptions,
)
from shortfin_apps.llm.components.kvcache.page_pool import PagePool
from shortfin_apps.llm.components.kvcache.window_pages import WindowPages


class KVCache:
    """A cache in which every page belongs to one lease; TrieCache shares the pages of prefixes.

    Page accounting in pure Python, without the device. Not thread-safe: only the engine uses it.
    """

    shares_prefixes: ClassVar[bool] = False

    def __init__(self, num_pages: int, stride: int, window: WindowOptions | None = None) -> None:
        if stride < 1:
            raise ValueError(f"A page of {stride} tokens holds nothing; use a stride of 1 or more.")
        self.stride = stride  # tokens per page
        self._pool = PagePool(num_pages)
        self._windows = None if window is None else WindowPages(window, stride)
        self._leases: set[Lease] = set()
        # Pages that suspect leases released. The engine clears them before the next invocation, because a
        # program may mask values by multiplying them by 0, and 0 * NaN is NaN.
        self.suspects: set[int] = set()
        self.window_suspects: set[int] = set()

    @property
    def has_suspects(self) -> bool:
        return bool(self.suspects or self.window_suspects)

    def acquire(self, token_ids: Sequence[int], cache_salt: str | None = None) -> Lease:
        """Create a lease on the longest published prefix of `token_ids[:-1]`.

        Takes a reference to each matched page, so that it is not evicted. Allocates no page and always
        succeeds.
        """
        lease = Lease(window_page_ids=None if self._windows is None else [])
        self._leases.add(lease)
        return lease

    def match_length(self, token_ids: Sequence[int], cache_salt: str | None = None) -> int:
        """Number of tokens that `acquire` would find now. Changes nothing, not even the eviction order."""
        return 0

    def reserve(self, lease: Lease, num_tokens: int, window_tokens: int | None = None) -> bool:
        """Grow the block table to hold `num_tokens` tokens in total, evicting pages if necessary.

        Window pages are needed only for the first `window_tokens` (None: for all). All or nothing: if there
        are too few pages of either kind, returns False and leaves the lease unchanged.
        """
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
        """Offer the lease's full pages for sharing, then give up window pages as `give_up` does.

        The K/V of the first `num_computed` of `token_ids` (None: of all) is in the lease's pages. Call it
        only after the invocation that wrote them has finished; calling it every step is cheap. The block
        table stays unchanged, even if another lease published the same tokens before.
        """
        self.give_up(lease, len(token_ids) if num_computed is None else num_computed)

    def give_up(self, lease: Lease, num_computed: int) -> None:
        """Release window pages that no token from position `num_computed` on sees."""
        if self._windows is not None:
            freed = self._windows.give_up(lease, num_computed)
            self.window_suspects.update(freed if lease.is_suspect else ())

    def retract(self, lease: Lease) -> None:
        """Withdraw the lease's published pages, which may hold NaN, so that `acquire` no longer finds them.

        This covers its first page and every page published as a continuation of it. Other leases that hold
        such pages keep them, and publish nothing after them.
        """

    def release(self, lease: Lease) -> None:
        """Release every page. Releasing twice is a no-op."""
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
        """Usage of window pages; None for a model without windows."""
        return None if self._windows is None else self._windows.usage()

    def cached_page_ids(self) -> list[int]:
        """Pages that are published but not leased."""
        return []

    def cached_window_page_ids(self) -> list[int]:
        """Window pages that are published but not leased."""
        return [] if self._windows is None else self._windows.cached_page_ids()

    def available(self) -> AvailablePages:
        pages, window = self.usage(), self.window_usage()
        available = pages.free + pages.cached
        return AvailablePages(available, None if window is None else window.free + window.cached)

    def flush(self) -> int:
        """Evict every published page that is not leased; returns the number freed."""
        return 0

    def check_integrity(self) -> None:
        """Raise AssertionError if any page is lost, owned twice or wrongly counted."""
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
