"""Changes to the set of published pages, for outside observers such as routers.

A published page has a serial number that no other page of the same cache ever gets. Its page ID may change,
as another page with the same K/V may replace it, and is meaningless to observers.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class PagesPublished(NamedTuple):
    """Newly published pages, each the continuation of the one before it.

    `parent` is the serial number of the page before the first one, or None if the pages begin a prompt, which
    has the salt `cache_salt`. `token_ids` holds the tokens of each page.
    """

    serials: tuple[int, ...]
    parent: int | None
    token_ids: tuple[tuple[int, ...], ...]
    cache_salt: str | None


class PagesWithdrawn(NamedTuple):
    """Unreachable pages, which requests no longer find."""

    serials: tuple[int, ...]


class AllPages(NamedTuple):
    """All published pages; a page comes after its parent."""

    published: tuple[PagesPublished, ...]


PageEvent = PagesPublished | PagesWithdrawn | AllPages


class PageListener(Protocol):
    """Follows a cache. Called on the engine's thread, so both members must return at once."""

    @property
    def has_room(self) -> bool:
        """Whether it can accept an event now. AllPages later makes up for missed events."""
        ...

    def tell(self, event: PageEvent) -> None: ...
