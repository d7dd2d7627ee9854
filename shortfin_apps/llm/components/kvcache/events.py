"""Changes to the set of published pages, for outside observers such as routers.

Each published page has a serial number, which no other page of the same cache ever gets. Observers get no
page IDs, because another page with the same K/V may replace a published page.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class PagesPublished(NamedTuple):
    """Newly published pages, each the continuation of the one before it.

    `parent` is the serial number of the page before the first one, or None if the first one begins a prompt.
    `token_ids` has the tokens of each page. `cache_salt` is the salt of a prompt that begins here, else None.
    """

    serials: tuple[int, ...]
    parent: int | None
    token_ids: tuple[tuple[int, ...], ...]
    cache_salt: str | None


class PagesWithdrawn(NamedTuple):
    """Pages that are no longer published: new requests cannot find them."""

    serials: tuple[int, ...]


class AllPages(NamedTuple):
    """All published pages; a page comes after its parent."""

    published: tuple[PagesPublished, ...]


PageEvent = PagesPublished | PagesWithdrawn | AllPages


class PageListener(Protocol):
    """Receives the events of a cache. Runs on the engine's thread, so both members must return at once."""

    @property
    def has_room(self) -> bool:
        """Whether the listener accepts an event now; an AllPages event later replaces missed events."""
        ...

    def tell(self, event: PageEvent) -> None: ...
