"""KV cache without prefix sharing (`--prefix-cache none`)."""

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
    """A cache in which each page belongs to one lease; its subclass TrieCache shares pages of prefixes.

    Only accounts for pages; BatchRunner owns their device memory. Not thread-safe: only the engine's thread
    may call.
    """

    shares_prefixes: ClassVar[bool] = False

    def __init__(self, num_pages: int, stride: int, window: WindowOptions | None = None) -> None:
        if stride < 1:
            raise ValueError(f"A page of {stride} tokens holds nothing; use a stride of 1 or more.")
        self.stride = stride  # tokens per page
        self._pool = PagePool(num_pages)
        self._windows = None if window is None else WindowPages(window, stride)
        self._leases: set[Lease] = set()
        # Released pages that may hold NaN. The engine zeroes them before the next invocation, because a
        # program may mask values by multiplying them by 0, and 0 * NaN is NaN.
        self.suspects: set[int] = set()
        self.window_suspects: set[int] = set()

    @property
    def has_suspects(self) -> bool:
        return bool(self.suspects or self.window_suspects)

    def acquire(self, token_ids: Sequence[int], cache_salt: str | None = None) -> Lease:
        """Create a lease on the longest published prefix of `token_ids[:-1]`; empty if nothing is shared.

        The lease holds a reference to each matched page, which prevents eviction. No page is allocated, so
        this always succeeds.
        """
        lease = Lease(window_page_ids=None if self._windows is None else [])
        self._leases.add(lease)
        return lease

    def match_length(self, token_ids: Sequence[int], cache_salt: str | None = None) -> int:
        """Return the number of tokens that `acquire` would find now; leaves the eviction order unchanged."""
        return 0

    def reserve(self, lease: Lease, num_tokens: int, window_tokens: int | None = None) -> bool:
        """Grow the block table to hold `num_tokens` tokens in total, evicting pages if necessary.

        The window table grows to hold `window_tokens` tokens (None: `num_tokens`). If there are too few pages
        of either kind, returns False and leaves the lease unchanged.
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

    def reserve_proposed(self, lease: Lease, count: int, num_kept: int) -> int:
        """Reserve `proposed_page_ids` for `count` proposed tokens, if states need them.

        At least `num_kept` pages stay available. Returns the number of tokens that may be proposed.
        """
        if self._windows is None or not self._windows.hold_states:
            return count
        count = max(0, min(count, self._windows.num_available - num_kept))
        self._windows.reserve_proposed(lease, count)
        return count

    def accept(self, lease: Lease, position: int, page_id: int) -> None:
        """Make `page_id`, with the state after the accepted token at `position`, its block's page."""
        assert self._windows is not None, "only states have pages of proposed tokens"
        self._windows.accept(lease, position // self.stride, page_id)

    def publish(self, lease: Lease, token_ids: Sequence[int], num_computed: int | None = None) -> None:
        """Offer the lease's full pages for sharing, then give up window pages as `give_up` does.

        `num_computed` is the number of leading `token_ids` whose K/V is in the lease's pages (None: all).
        Callers must wait until the invocation that wrote the pages has finished. Calling this in every step
        is cheap. The block table stays unchanged, even if another lease published the same tokens before.
        """
        self.give_up(lease, len(token_ids) if num_computed is None else num_computed)

    def give_up(self, lease: Lease, num_computed: int) -> None:
        """Release window pages that no token from position `num_computed` on attends to."""
        if self._windows is not None:
            freed = self._windows.give_up(lease, num_computed)
            self.window_suspects.update(freed if lease.is_suspect else ())

    def retract(self, lease: Lease) -> None:
        """Withdraw the lease's published pages, which may hold NaN, so that `acquire` finds no such page.

        Also withdraws the pages that any other lease published as continuations of this lease's first page.
        These leases keep their pages, and publish no further pages.
        """

    def hold(self, leases: Sequence[Lease]) -> None:
        """Keep the leases' pages until `let_go`, because an invocation in flight uses them."""
        for lease in leases:
            lease.num_in_flight += 1

    def let_go(self, leases: Sequence[Lease]) -> None:
        """Undo one `hold`; the last one releases pages of proposed tokens, and completes a release."""
        for lease in leases:
            lease.num_in_flight -= 1
            if lease.proposed_page_ids and not lease.num_in_flight:
                self._release_proposed(lease)
            if lease.has_ended:
                self.release(lease)

    def release(self, lease: Lease) -> None:
        """Release every page of the lease, or have `let_go` do it if invocations in flight use the pages.

        Releasing a lease twice is a no-op.
        """
        lease.has_ended = True
        if lease.released or lease.num_in_flight:
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

    def _release_proposed(self, lease: Lease) -> None:
        assert self._windows is not None
        freed = self._windows.release_proposed(lease)
        self.window_suspects.update(freed if lease.is_suspect else ())

    def usage(self) -> CacheUsage:
        total, free, cached = self._pool.total, self._pool.num_free, self._num_evictable()
        return CacheUsage(total=total, free=free, cached=cached, leased=total - free - cached)

    def window_usage(self) -> CacheUsage | None:
        """Return the usage of window pages; None for a model without windows."""
        return None if self._windows is None else self._windows.usage()

    def cached_page_ids(self) -> list[int]:
        """Return the IDs of pages that are published but not leased."""
        return []

    def cached_window_page_ids(self) -> list[int]:
        """Return the IDs of window pages that are published but not leased."""
        return [] if self._windows is None else self._windows.cached_page_ids()

    def available(self) -> AvailablePages:
        pages, window = self.usage(), self.window_usage()
        available = pages.free + pages.cached
        return AvailablePages(available, None if window is None else window.free + window.cached)

    def flush(self) -> int:
        """Evict every published page that is not leased; returns the number of pages freed."""
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
        """Return how many pages a table lacks for `num_tokens` tokens; 0 if there is no table."""
        return 0 if page_ids is None else max(0, -(-num_tokens // self.stride) - len(page_ids))

    def _nodes(self) -> Iterable[CachedNode]:
        """Return the trie nodes, which may keep window pages; none without prefix sharing."""
        return ()

    def _allocate(self, count: int) -> list[int] | None:
        return self._pool.allocate(count)

    def _free_pages(self, lease: Lease) -> None:
        for page_id in lease.page_ids:
            self._pool.release(page_id)

    def _num_evictable(self) -> int:
        return 0

    def _count_references(self) -> Counter[int]:
        """Recount the references to each page from the page's owners."""
        return Counter(page_id for lease in self._leases for page_id in lease.page_ids)
