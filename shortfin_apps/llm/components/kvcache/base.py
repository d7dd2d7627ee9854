"""What the scheduler may ask of a KV cache, whichever way its pages are shared.

A Lease is one request's claim: its block table, in order. Pages are claimed as the request grows and
given back by `release` alone. Page 0 is the scratch page: padding rows read and write it, nobody owns it.

    page_ids:  | shared: full, read-only | private: written by this request alone |
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
    cached: int  # published, leased by nobody: evictable
    leased: int


@dataclass(slots=True, eq=False)
class Lease:
    """One request's pages. Only the cache that made it may change it.

    `page_ids` is one list for the lease's life, added to at its end alone and emptied by `release`, so that
    block tables made of it can be kept.
    """

    page_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0  # tokens whose K/V was found in shared pages at `acquire`
    num_shared_pages: int = 0  # leading pages whose content is published; nobody writes them any more
    is_suspect: bool = False  # something was computed into its pages that is not known to be numbers
    released: bool = False


class KVCache(ABC):
    """Page accounting. Pure Python: it never sees the device. Not thread-safe: the engine's alone."""

    shares_prefixes: ClassVar[bool] = False
    stride: int  # tokens per page
    # Pages that suspect leases gave back. Whoever runs invocations clears them before the next one: a program
    # may multiply what it does not read by 0, which leaves NaN what it is.
    suspects: set[int]

    @abstractmethod
    def acquire(self, tokens: Sequence[int], cache_salt: str | None = None) -> Lease:
        """A lease holding the longest published prefix of `tokens`, at most `len(tokens) - 1` long.

        Takes references on matched pages (so that no later eviction can free them) and allocates
        none: it always succeeds.
        """

    @abstractmethod
    def match_length(self, tokens: Sequence[int], cache_salt: str | None = None) -> int:
        """What `acquire` would find now, in tokens. Changes nothing, not even what is evicted next."""

    @abstractmethod
    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        """Grows the block table to hold `num_tokens` tokens in all, evicting if it must.

        All or nothing: False, and nothing changed for the lease, when pages run short.
        """

    @abstractmethod
    def publish(self, lease: Lease, tokens: Sequence[int], num_computed: int | None = None) -> None:
        """Offers the lease's full pages for sharing.

        The K/V of the first `num_computed` of `tokens` (None: of all) is in the lease's pages. Call it
        only after the invocation that put it there has finished; calling it every step is cheap. The
        block table stays as it is, also when somebody else published the same tokens before.
        """

    @abstractmethod
    def retract(self, lease: Lease) -> None:
        """Takes back what the lease shares, for its pages may be bad: nobody finds them any more.

        That is its first page and all that continues it. Who leases such pages keeps them, and publishes
        nothing behind them.
        """

    @abstractmethod
    def release(self, lease: Lease) -> None:
        """Gives every page back. Releasing twice is a no-op."""

    @abstractmethod
    def usage(self) -> CacheUsage: ...

    @abstractmethod
    def flush(self) -> int:
        """Forgets every published page that nobody leases; returns how many became free."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises AssertionError when any page is lost, doubly owned or wrongly counted."""
