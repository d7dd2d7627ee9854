"""Leases of pages of a KV cache, with or without prefix sharing.

A lease holds one request's pages in the order of its block table. Pages are added as the request grows, and
released only by `KVCache.release`. Page 0 is the scratch page: padding rows read and write it, and no lease
holds it.

    page_ids:  | shared: full, read-only | private: written by this request only |
               0 ............. num_shared_pages ................... len(page_ids)

Sliding-window layers use separate pages, with a separate block table in the lease. Window pages are added
shortly before their tokens are computed, and given up as soon as no later token attends to them:

    window_page_ids:  | given up: IDs are meaningless  | held: shared or private |
                      0 ................... num_given_up ....... len(window_page_ids)

If window pages hold recurrent states, a page has the state after the last computed token of its block. If a
proposed token is rejected, the state before it is needed again. The state after a proposed token is therefore
written to a page outside of the table. That page replaces the page of the token's block once the token is
accepted (`KVCache.accept`). The others are released after the invocation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

SCRATCH_PAGE = 0


class CacheUsage(NamedTuple):
    """Page counts by state, without the scratch page: `free + cached + leased == total`."""

    total: int
    free: int
    cached: int  # published but not leased: evictable
    leased: int


class AvailablePages(NamedTuple):
    """Numbers of pages and window pages that are free or can be evicted."""

    pages: int
    window_pages: int | None = None

    @property
    def fewest(self) -> int:
        """Number of available pages of the scarcer kind."""
        return self.pages if self.window_pages is None else min(self.pages, self.window_pages)

    def exceeds(self, other: AvailablePages) -> bool:
        """Return whether more pages of either kind are available than in `other`."""
        return self.pages > other.pages or (self.window_pages or 0) > (other.window_pages or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowOptions:
    """Options of sliding-window layers; `tokens` is the window size, including the attending token.

    `holds_states`: a page holds the state after its last token, instead of its tokens' keys and values.
    """

    tokens: int
    num_pages: int  # including the scratch page
    holds_states: bool = False


@dataclass(slots=True, eq=False)
class Lease:
    """One request's pages. Only the cache that created the lease may change it.

    `page_ids` stays the same list object for the lease's lifetime: pages are only appended until `release`
    empties the list. Block tables built from the list can therefore be reused. The same holds for
    `window_page_ids`, which is None for a model without windows, but for states of proposed tokens: `accept`
    replaces the list and empties the old one.
    """

    page_ids: list[int] = field(default_factory=list)
    window_page_ids: list[int] | None = None
    num_given_up: int = 0  # leading `window_page_ids` that are no longer held
    proposed_page_ids: list[int] = field(default_factory=list)  # window pages of proposed tokens' states
    num_cached_tokens: int = 0  # tokens with K/V found in shared pages at `acquire`
    num_shared_pages: int = 0  # leading pages that are published; never written again
    is_suspect: bool = False  # its pages may hold NaN or infinity
    num_in_flight: int = 0  # invocations in flight that use its pages
    has_ended: bool = False  # its request has left; the pages are released once nothing is in flight
    released: bool = False

    @property
    def num_pages(self) -> int:
        """Number of pages in the block table; in the shorter table if there are two."""
        num_pages = len(self.page_ids)
        return num_pages if self.window_page_ids is None else min(num_pages, len(self.window_page_ids))

    @property
    def held_window_page_ids(self) -> list[int]:
        """The window pages that are held, also for proposed tokens; none for a model without windows."""
        return [*(self.window_page_ids or ())[self.num_given_up :], *self.proposed_page_ids]


PageKey = tuple[str | None, tuple[int, ...]]  # the salt (None after the first page), the tokens


@dataclass(slots=True, eq=False)
class CachedNode:
    """A node of the prefix trie: a page of cached tokens, and the window page kept with it, if any."""

    key: PageKey
    parent: CachedNode | None  # None only for the root, which has no page
    page_id: int
    serial: int  # never reused by another node
    window_page_id: int = SCRATCH_PAGE  # which means none
    children: dict[PageKey, CachedNode] = field(default_factory=dict)
    num_leases: int = 0  # leases with this node on their published path
    copies: list[int] = field(default_factory=list)  # other pages with this K/V, held by some of these leases
