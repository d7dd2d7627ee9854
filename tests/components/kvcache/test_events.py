"""What a listener is told; cache_machine.py checks that it is all, after any operations."""

from __future__ import annotations

from shortfin_apps.llm.components.kvcache import make_cache
from shortfin_apps.llm.components.kvcache.events import AllPages, PageEvent, PagesPublished, PagesWithdrawn
from shortfin_apps.llm.components.kvcache.trie_cache import TrieCache
from tests.components.kvcache.mirror import Mirror

STRIDE = 2


def followed(num_pages: int = 9) -> tuple[TrieCache, Mirror]:
    mirror = Mirror()
    return TrieCache(num_pages, STRIDE, listener=mirror), mirror


def serve(cache: TrieCache, tokens: list[int], salt: str | None = None) -> None:
    lease = cache.acquire(tokens, salt)
    assert cache.reserve(lease, len(tokens))
    cache.publish(lease, tokens)
    cache.release(lease)


def new_events(mirror: Mirror) -> list[PageEvent]:
    events = list(mirror.events)
    mirror.events.clear()
    return events


def test_a_prompts_pages_are_one_event_and_a_longer_prompts_begin_behind_them() -> None:
    cache, mirror = followed()
    serve(cache, [1, 2, 3, 4, 5], "s")
    serve(cache, [1, 2, 3, 4, 5, 6, 7, 8], "s")
    assert new_events(mirror) == [
        PagesPublished((1, 2), None, ((1, 2), (3, 4)), "s"),
        PagesPublished((3, 4), 2, ((5, 6), (7, 8)), None),
    ]


def test_pages_that_are_published_already_are_not_told_again() -> None:
    cache, mirror = followed()
    leases = [cache.acquire([1, 2, 3, 4]) for _ in range(2)]
    for lease in leases:
        assert cache.reserve(lease, 4)
    for lease in leases:
        cache.publish(lease, [1, 2, 3, 4])
    assert new_events(mirror) == [PagesPublished((1, 2), None, ((1, 2), (3, 4)), None)]
    for lease in leases:
        cache.release(lease)
    assert new_events(mirror) == []


def test_the_same_tokens_under_another_salt_are_other_pages() -> None:
    cache, mirror = followed()
    for salt in (None, "", "a", "b"):
        serve(cache, [1, 2], salt)
    events = new_events(mirror)
    assert [event.cache_salt for event in events if isinstance(event, PagesPublished)] == [None, "", "a", "b"]
    assert len(mirror.pages) == 4


def test_eviction_and_retraction_withdraw_pages() -> None:
    cache, mirror = followed(num_pages=4)
    serve(cache, [1, 2, 3, 4])
    lease = cache.acquire([5, 6, 7, 8])
    assert cache.reserve(lease, 4)
    cache.publish(lease, [5, 6, 7, 8])
    cache.retract(lease)
    assert new_events(mirror) == [
        PagesPublished((1, 2), None, ((1, 2), (3, 4)), None),
        PagesWithdrawn((2,)),
        PagesPublished((3, 4), None, ((5, 6), (7, 8)), None),
        PagesWithdrawn((3, 4)),
    ]
    cache.release(lease)
    assert new_events(mirror) == []


def test_a_flush_that_leaves_pages_withdraws_the_others() -> None:
    cache, mirror = followed()
    serve(cache, [1, 2, 3, 4, 5, 6])
    lease = cache.acquire([1, 2, 3])
    new_events(mirror)
    cache.flush()
    cache.flush()
    assert new_events(mirror) == [PagesWithdrawn((3, 2))]
    cache.release(lease)
    cache.flush()
    assert new_events(mirror) == [AllPages(())]


def test_a_listener_that_had_no_room_is_told_all_pages_at_the_next_change() -> None:
    cache, mirror = followed()
    serve(cache, [1, 2, 3, 4])
    mirror.has_room = False
    serve(cache, [1, 2, 5, 6], None)
    mirror.has_room = True
    serve(cache, [7, 8], "s")
    serve(cache, [9, 9])
    _, everything, last = new_events(mirror)
    assert isinstance(everything, AllPages)
    assert len(everything.published) == 4
    assert last == PagesPublished((5,), None, ((9, 9),), None)
    assert len(mirror.pages) == 5


def test_a_cache_that_shares_nothing_tells_nothing() -> None:
    mirror = Mirror()
    cache = make_cache("none", 9, STRIDE, listener=mirror)
    lease = cache.acquire([1, 2, 3, 4])
    assert cache.reserve(lease, 4)
    cache.publish(lease, [1, 2, 3, 4])
    cache.release(lease)
    cache.flush()
    assert mirror.events == []
