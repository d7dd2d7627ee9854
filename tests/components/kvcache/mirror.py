"""A mirror of a cache's published pages, kept by the cache's events alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from shortfin_apps.llm.components.kvcache.events import PageEvent, PagesPublished, PagesWithdrawn

Prefix = tuple[str | None, tuple[int, ...]]  # the salt, and all tokens from the first one


@dataclass
class Mirror:
    """`pages` has the prefix that each published page ends, by its serial number."""

    has_room: bool = True
    pages: dict[int, Prefix] = field(default_factory=dict)
    serials: set[int] = field(default_factory=set)  # all that were ever used
    events: list[PageEvent] = field(default_factory=list)

    def tell(self, event: PageEvent) -> None:
        assert self.has_room
        self.events.append(event)
        if isinstance(event, PagesPublished):
            assert self.serials.isdisjoint(event.serials), "a serial number is used again"
            self.add(event)
        elif isinstance(event, PagesWithdrawn):
            assert event.serials, "an event says nothing"
            for serial in event.serials:
                del self.pages[serial]
        else:
            self.pages.clear()
            for published in event.published:
                self.add(published)

    def add(self, event: PagesPublished) -> None:
        assert len(event.serials) == len(event.token_ids) > 0
        salt, tokens = (event.cache_salt, ()) if event.parent is None else self.pages[event.parent]
        for serial, token_ids in zip(event.serials, event.token_ids, strict=True):
            tokens = (*tokens, *token_ids)
            assert serial not in self.pages
            self.pages[serial] = (salt, tokens)
        self.serials.update(event.serials)
