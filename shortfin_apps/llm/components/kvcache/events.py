"""Changes of the set of published pages, for those who follow it from outside, such as routers.

A published page has a serial number, which no other page of the same cache ever gets; its id may change, as
another page with the same K/V may take its place, and says nothing to others.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class PagesPublished(NamedTuple):
    """Pages that requests can find from now on, each the continuation of the one before it.

    `parent` is the serial number of the page before the first of them, None where they begin a prompt;
    `cache_salt` is that of such a prompt. `token_ids` are those of each page.
    """

    serials: tuple[int, ...]
    parent: int | None
    token_ids: tuple[tuple[int, ...], ...]
    cache_salt: str | None


class PagesWithdrawn(NamedTuple):
    """Pages that no request finds any more."""

    serials: tuple[int, ...]


class AllPages(NamedTuple):
    """All pages that requests can find from now on; a page comes behind its parent."""

    published: tuple[PagesPublished, ...]


PageEvent = PagesPublished | PagesWithdrawn | AllPages


class PageListener(Protocol):
    """Follows a cache; called in the engine's thread, so both must return at once."""

    @property
    def has_room(self) -> bool:
        """Whether it can be told something now. What it misses meanwhile is made up for by AllPages."""
        ...

    def tell(self, event: PageEvent) -> None: ...
