"""Leases of pages of a KV cache, with or without prefix sharing.

A Lease holds one request's pages: its block table, in order. Pages are added as the request grows and
released only by `release`. Page 0 is the scratch page: padding rows read and write it, and no lease holds it.

    page_ids:  | shared: full, read-only | private: written by this request only |
               0 ............. num_shared_pages ................... len(page_ids)

Sliding-window layers use separate pages, with their own table in the lease. These pages are added as they are
computed, and given up as soon as no later token sees them:

    window_page_ids:  | given up: the ids mean nothing | held: shared or private |
                      0 ................... num_given_up ....... len(window_page_ids)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

SCRATCH_PAGE = 0


class CacheUsage(NamedTuple):
    """Pages by state; `free + cached + leased == total`, all without the scratch page."""

    total: int
    free: int
    cached: int  # published but not leased: evictable
    leased: int


class AvailablePages(NamedTuple):
    """Pages of each table that are free or can be evicted."""

    pages: int
    window_pages: int | None = None

    @property
    def fewest(self) -> int:
        """Number available of the scarcer kind."""
        return self.pages if self.window_pages is None else min(self.pages, self.window_pages)

    def exceeds(self, other: AvailablePages) -> bool:
        """Whether more pages of any kind are available than in `other`."""
        return self.pages > other.pages or (self.window_pages or 0) > (other.window_pages or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowOptions:
    """Sliding-window layers: window size in `tokens`, including the token itself, and number of pages."""

    tokens: int
    num_pages: int  # including the scratch page


@dataclass(slots=True, eq=False)
class Lease:
    """One request's pages. Only the cache that created the lease may change it.

    `page_ids` is the same list for the lease's lifetime: appended to, and finally emptied by `release`, so
    that block tables built from it can be reused. The same holds for `window_page_ids`, which is None for a
    model without windows.
    """

    page_ids: list[int] = field(default_factory=list)
    window_page_ids: list[int] | None = None
    num_given_up: int = 0  # leading `window_page_ids` that are no longer held
    num_cached_tokens: int = 0  # tokens with K/V found in shared pages at `acquire`
    num_shared_pages: int = 0  # leading pages that are published; they are not written any more
    is_suspect: bool = False  # its pages may hold NaN or infinity
    released: bool = False

    @property
    def num_pages(self) -> int:
        """Number of leading pages for which every table has room."""
        tables = (self.page_ids, self.window_page_ids)
        return min(len(page_ids) for page_ids in tables if page_ids is not None)


PageKey = tuple[str | None, tuple[int, ...]]  # the salt (first page only), and the page's tokens


@dataclass(slots=True, eq=False)
class CachedNode:
    """A node of the prefix trie: a page of cached tokens, and the window page kept with it, if any."""

    key: PageKey
    parent: CachedNode | None  # None only for the root, which has no page
    page_id: int
    serial: int  # never reused by another node
    window_page_id: int = SCRATCH_PAGE  # none
    children: dict[PageKey, CachedNode] = field(default_factory=dict)
    num_leases: int = 0  # leases with this node on their published path
    copies: list[int] = field(default_factory=list)  # pages in which some of these leases hold the same K/V
