from __future__ import annotations

import msgpack
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant

from shortfin_apps.llm.components.kv_events.block_hashes import BlockHashes, announced
from shortfin_apps.llm.components.kv_events.messages import EventEncoder
from shortfin_apps.llm.components.kvcache import KVCache, make_cache
from shortfin_apps.llm.components.kvcache.events import AllPages, PageEvent, PagesPublished, PagesWithdrawn
from tests.components.kv_events.subscriber import Index
from tests.components.kvcache.cache_machine import CacheMachine

FIRST = PagesPublished((1, 2), None, ((5, 6), (7, 8)), None)
LONGER = PagesPublished((3,), 2, ((9, 9),), None)
SALTED = PagesPublished((4, 5), None, ((5, 6), (7, 8)), "digest:")


def hashes_of(*events: PagesPublished) -> list[int]:
    hashes = BlockHashes("0")
    return [announced(each) for event in events for each in hashes.add(event)]


def batch_of(*events: PageEvent) -> object:
    return msgpack.unpackb(EventEncoder(2, "0").encode(1.5, events))


def test_a_batch_has_vllms_fields_in_their_order() -> None:
    a, b, c = hashes_of(FIRST, LONGER)
    assert batch_of(FIRST, LONGER, PagesWithdrawn((3, 2))) == [
        1.5,
        [
            ["BlockStored", [a, b], None, [5, 6, 7, 8], 2, None, "GPU", None, None],
            ["BlockStored", [c], b, [9, 9], 2, None, "GPU", None, None],
            ["BlockRemoved", [c, b], "GPU"],
        ],
        0,
    ]


def test_a_salt_is_an_extra_key_of_the_first_block_and_changes_all_hashes() -> None:
    salted = hashes_of(SALTED)
    assert set(salted).isdisjoint(hashes_of(FIRST))
    extra_keys = [["digest:"], None]
    stored = ["BlockStored", salted, None, [5, 6, 7, 8], 2, None, "GPU", None, extra_keys]
    assert batch_of(SALTED) == [1.5, [stored], 0]


def test_all_pages_are_told_after_a_clear() -> None:
    a, b, c = hashes_of(FIRST, LONGER)
    everything = AllPages(
        (PagesPublished((7,), None, ((5, 6),), None), PagesPublished((8,), 7, ((7, 8),), None))
    )
    assert batch_of(FIRST, LONGER, AllPages(()), everything, PagesWithdrawn((8,))) == [
        1.5,
        [
            ["BlockStored", [a, b], None, [5, 6, 7, 8], 2, None, "GPU", None, None],
            ["BlockStored", [c], b, [9, 9], 2, None, "GPU", None, None],
            ["AllBlocksCleared"],
            ["AllBlocksCleared"],
            ["BlockStored", [a], None, [5, 6], 2, None, "GPU", None, None],
            ["BlockStored", [b], a, [7, 8], 2, None, "GPU", None, None],
            ["BlockRemoved", [b], "GPU"],
        ],
        0,
    ]


class Wire:
    """A listener to whom each event comes as a subscriber gets it."""

    has_room = True

    def __init__(self, page_tokens: int) -> None:
        self.index = Index(page_tokens)
        self._encoder = EventEncoder(page_tokens, None)

    def tell(self, event: PageEvent) -> None:
        self.index.apply(self._encoder.encode(0.0, [event]))


class PublishedMachine(CacheMachine):
    """Any operations of a trie, followed by a subscriber."""

    name = "trie"

    def new_cache(self, num_pages: int, data: st.DataObject) -> KVCache:
        self.wire = Wire(self.stride)
        return make_cache(self.name, num_pages, self.stride, listener=self.wire)

    def the_mirror_has_the_published_pages(self) -> None:
        """The subscriber is it, in this machine."""

    @invariant()
    def the_subscriber_has_the_published_pages(self) -> None:
        expected = {(None if salt is None else (salt,), tokens) for salt, tokens in self.published}
        found = list(self.wire.index.stored.values())
        assert set(found) == expected
        assert len(found) == len(expected)


TestPublished = PublishedMachine.TestCase
TestPublished.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
