"""Pages of sliding-window layers, in a pool separate from other pages.

A lease gives up (releases) a window page as soon as no later token attends to it. A trie node may keep its
window page, so that a new lease that continues the node's prefix can reuse the page. If no lease holds a kept
page, the page can be evicted while the node stays in the trie. A prefix matches only up to a node after which
tokens attend to no missing window page.

Pages of recurrent states are window pages too. A lease also holds one for each proposed token (lease.py).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from shortfin_apps.llm.components.kvcache.lease import (
    SCRATCH_PAGE,
    CachedNode,
    CacheUsage,
    Lease,
    WindowOptions,
)
from shortfin_apps.llm.components.kvcache.page_pool import PagePool


class WindowPages:
    """The pool of window pages, and the window pages that trie nodes keep."""

    def __init__(self, options: WindowOptions, stride: int) -> None:
        if options.tokens < 1:
            raise ValueError(f"A window of {options.tokens} tokens sees nothing; use one of 1 or more.")
        self._pool = PagePool(options.num_pages)
        self._tokens = options.tokens
        self.hold_states = options.holds_states
        self._stride = stride
        self._nodes: dict[int, CachedNode] = {}  # by window page ID; a node holds one reference to its page
        self._unleased: OrderedDict[int, None] = OrderedDict()  # kept pages without a lease, oldest first

    @property
    def num_seen(self) -> int:
        """Number of earlier pages that the first token of a page attends to."""
        return -(-(self._tokens - 1) // self._stride)

    @property
    def num_available(self) -> int:
        """Number of pages that are free or can be evicted."""
        return self._pool.num_free + len(self._unleased)

    def usage(self) -> CacheUsage:
        total, free, cached = self._pool.total, self._pool.num_free, len(self._unleased)
        return CacheUsage(total=total, free=free, cached=cached, leased=total - free - cached)

    def cached_page_ids(self) -> list[int]:
        """Return the IDs of pages that nodes keep and no lease holds."""
        return list(self._unleased)

    def allocate(self, count: int) -> list[int]:
        """Allocate pages with one reference each, evicting the least recently released if necessary.

        Callers must ensure that `num_available` is at least `count`.
        """
        for _ in range(count - self._pool.num_free):
            self.drop(self._nodes[next(iter(self._unleased))])
        page_ids = self._pool.allocate(count)
        assert page_ids is not None, "as many are available"
        return page_ids

    def flush(self) -> None:
        """Evict every kept page that is not leased."""
        while self._unleased:
            self.drop(self._nodes[next(iter(self._unleased))])

    def num_usable(self, nodes: Sequence[CachedNode]) -> int:
        """Return the length in pages of the longest reusable prefix of `nodes`, a path from the root.

        After a reusable prefix, tokens attend only to window pages that nodes still keep.
        """
        usable = kept = 0  # kept: consecutive kept pages up to the current one
        for count, node in enumerate(nodes, 1):
            kept = 0 if node.window_page_id == SCRATCH_PAGE else kept + 1
            if kept >= min(count, self.num_seen):
                usable = count
        return usable

    def share(self, lease: Lease, nodes: Sequence[CachedNode]) -> None:
        """Fill the table of a new lease on `nodes`, sharing the pages that later tokens will attend to."""
        assert lease.window_page_ids is not None
        lease.num_given_up = max(0, len(nodes) - self.num_seen)
        for index, node in enumerate(nodes):
            is_seen = index >= lease.num_given_up
            lease.window_page_ids.append(node.window_page_id if is_seen else SCRATCH_PAGE)
            if is_seen:
                self._pool.retain(node.window_page_id)
                self._unleased.pop(node.window_page_id, None)

    def keep(self, node: CachedNode, lease: Lease, index: int) -> None:
        """Let `node` keep the lease's page at `index`, unless the node has a page or the lease gave it up."""
        assert lease.window_page_ids is not None
        if node.window_page_id != SCRATCH_PAGE or index < lease.num_given_up:
            return
        node.window_page_id = page_id = lease.window_page_ids[index]
        self._pool.retain(page_id)
        self._nodes[page_id] = node

    def drop(self, node: CachedNode) -> None:
        """Remove the node's window page, if any; leases that hold the page are unaffected."""
        page_id, node.window_page_id = node.window_page_id, SCRATCH_PAGE
        if page_id != SCRATCH_PAGE:
            del self._nodes[page_id]
            self._unleased.pop(page_id, None)
            self._pool.release(page_id)

    def reserve_proposed(self, lease: Lease, count: int) -> None:
        """Add pages for the states after `count` proposed tokens; so many must be available."""
        lease.proposed_page_ids += self.allocate(count)

    def accept(self, lease: Lease, index: int, page_id: int) -> None:
        """Exchange the lease's page at `index` for `page_id`, a page of a proposed token."""
        table = lease.window_page_ids
        assert table is not None
        lease.proposed_page_ids.remove(page_id)
        lease.proposed_page_ids.append(table[index])
        lease.window_page_ids = [*table[:index], page_id, *table[index + 1 :]]
        table.clear()  # rows of block tables made from it can be used for others

    def release_proposed(self, lease: Lease) -> list[int]:
        """Release the pages of proposed tokens, and return their IDs; no other lease holds them."""
        page_ids, lease.proposed_page_ids = lease.proposed_page_ids, []
        for page_id in page_ids:
            self._pool.release(page_id)
        return page_ids

    def give_up(self, lease: Lease, num_computed: int) -> list[int]:
        """Release the lease's pages that no token from position `num_computed` on attends to.

        Returns the IDs of the pages that are now free.
        """
        first_seen = max(0, num_computed - self._tokens + 1) // self._stride
        return self._release(lease, first_seen)

    def give_up_all(self, lease: Lease) -> list[int]:
        """Release all pages of the lease and empty its table. Returns the IDs of pages that are now free."""
        assert lease.window_page_ids is not None
        freed = self._release(lease, len(lease.window_page_ids)) + self.release_proposed(lease)
        lease.window_page_ids.clear()
        lease.num_given_up = 0
        return freed

    def _release(self, lease: Lease, stop: int) -> list[int]:
        """Release the lease's pages before index `stop`; returns the IDs of pages that are now free."""
        assert lease.window_page_ids is not None
        stop = min(stop, len(lease.window_page_ids))
        page_ids = lease.window_page_ids[lease.num_given_up : stop]
        lease.num_given_up = max(stop, lease.num_given_up)
        for page_id in page_ids:
            self._pool.release(page_id)
            if page_id in self._nodes and self._pool.references(page_id) == 1:
                self._unleased[page_id] = None
        return [page_id for page_id in page_ids if not self._pool.references(page_id)]

    def check_integrity(self, leases: Iterable[Lease], nodes: Iterable[CachedNode]) -> None:
        """Raise AssertionError unless exactly these leases and nodes own the pages that are not free."""
        self._pool.check_integrity()
        kept = {node.window_page_id: node for node in nodes if node.window_page_id != SCRATCH_PAGE}
        assert kept == self._nodes, "a window's page is kept by another node"
        leased = Counter(page_id for lease in leases for page_id in lease.held_window_page_ids)
        for page_id in range(1, self._pool.num_pages):
            owned, counted = leased[page_id] + (page_id in kept), self._pool.references(page_id)
            assert owned == counted, f"window page {page_id} has {owned} owners and {counted} references"
            is_unleased = page_id in kept and not leased[page_id]
            assert is_unleased == (page_id in self._unleased), f"window page {page_id} is misfiled"
