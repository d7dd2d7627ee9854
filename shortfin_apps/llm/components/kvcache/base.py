"""The interface of a KV cache: leases of pages, with or without sharing of prefixes.

A Lease holds one request's pages: its block table, in order. Pages are added as the request grows and
released only by `release`. Page 0 is the scratch page: padding rows read and write it, and no lease holds it.

    page_ids:  | shared: full, read-only | private: written by this request only |
               0 ............. num_shared_pages ................... len(page_ids)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

SCRATCH_PAGE = 0


class CacheUsage(NamedTuple):
    """Pages by state; `free + cached + leased == total` (the scratch page is in none of them)."""

    total: int
    free: int
    cached: int  # published but not leased: evictable
    leased: int


@dataclass(slots=True, eq=False)
class Lease:
    """One request's pages. Only the cache that made the lease may change it.

    `page_ids` is the same list as long as the lease lives, appended to and at last emptied by `release`, so
    that block tables built from it can be reused.
    """

    page_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0  # tokens whose K/V was found in shared pages at `acquire`
    num_shared_pages: int = 0  # leading pages whose content is published; they are not written any more
    is_suspect: bool = False  # its pages may hold NaN or infinity
    released: bool = False


class KVCache(ABC):
    """Page accounting in pure Python, without the device. Not thread-safe: only the engine uses it."""

    shares_prefixes: ClassVar[bool] = False
    stride: int  # tokens per page
    # Pages that suspect leases released. The engine clears them before the next invocation, as a program may
    # mask values it does not need by multiplying them by 0, and 0 * NaN is NaN.
    suspects: set[int]

    @abstractmethod
    def acquire(self, token_ids: Sequence[int], cache_salt: str | None = None) -> Lease:
        """A lease holding the longest published prefix of `token_ids`, at most `len(token_ids) - 1` long.

        Takes a reference to each matched page, so that it is not evicted. Allocates no page and always
        succeeds.
        """

    @abstractmethod
    def match_length(self, token_ids: Sequence[int], cache_salt: str | None = None) -> int:
        """Tokens that `acquire` would find now. Changes nothing, not even the order of eviction."""

    @abstractmethod
    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        """Grows the block table to hold `num_tokens` tokens in total, evicting pages if necessary.

        All or nothing: if there are too few pages, returns False and leaves the lease unchanged.
        """

    @abstractmethod
    def publish(self, lease: Lease, token_ids: Sequence[int], num_computed: int | None = None) -> None:
        """Offers the lease's full pages for sharing.

        The K/V of the first `num_computed` of `token_ids` (None: of all) is in the lease's pages. Call it
        only after the invocation that wrote it has finished; calling it every step is cheap. The block
        table stays unchanged, even if another lease published the same tokens before.
        """

    @abstractmethod
    def retract(self, lease: Lease) -> None:
        """Withdraws the lease's published pages, as they may hold NaN: `acquire` does not find them any more.

        These are its first page and every page published as a continuation of it. Other leases that hold
        such pages keep them, and publish nothing after them.
        """

    @abstractmethod
    def release(self, lease: Lease) -> None:
        """Releases every page. Releasing twice is a no-op."""

    @abstractmethod
    def usage(self) -> CacheUsage: ...

    @abstractmethod
    def flush(self) -> int:
        """Evicts every published page that is not leased; returns how many became free."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises AssertionError if any page is lost, owned twice or wrongly counted."""
