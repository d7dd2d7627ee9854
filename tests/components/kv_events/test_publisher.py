"""The publisher over real sockets on loopback."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.kv_events import publisher as publisher_module
from shortfin_apps.llm.components.kv_events.options import KVEventsError, KVEventSettings
from shortfin_apps.llm.components.kv_events.publisher import KVEventPublisher, ReplayBuffer
from shortfin_apps.llm.components.kvcache.events import AllPages, PageEvent, PagesPublished, PagesWithdrawn
from shortfin_apps.llm.components.kvcache.trie_cache import TrieCache
from tests.components.kv_events.subscriber import PATIENCE_MS, Index, Subscriber

LOOPBACK = "tcp://127.0.0.1:*"
TOPIC = "kv@10.0.0.1:8000@tiny"
STRIDE = 2
Opened = list[KVEventPublisher | Subscriber]


class Batches:
    """The publisher's clock, which it asks for the time of each batch."""

    def __init__(self) -> None:
        self._published = threading.Semaphore(0)

    def __call__(self) -> float:
        self._published.release()
        return 0.0

    def wait(self) -> None:
        """Until one more batch is under way."""
        assert self._published.acquire(timeout=PATIENCE_MS / 1000)


@pytest.fixture
def opened() -> Iterator[Opened]:
    """What a test opened, which is closed after it."""
    things: Opened = []
    yield things
    for thing in things:
        thing.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kv events"]


def start(
    opened: Opened, *, seed: str | None = "0", **options: Any
) -> tuple[KVEventPublisher, Subscriber, Batches]:
    batches = Batches()
    endpoints = KVEventSettings(
        kv_events_endpoint=LOOPBACK, kv_events_replay_endpoint=LOOPBACK, kv_events_topic=TOPIC
    )
    publisher = KVEventPublisher(endpoints, STRIDE, hash_seed=seed, clock=batches, **options)
    opened.append(publisher)
    batches.wait()
    return publisher, subscribe(opened, publisher), batches


def subscribe(opened: Opened, publisher: KVEventPublisher, receive_batches: int = 1000) -> Subscriber:
    assert publisher.endpoint is not None
    subscriber = Subscriber(publisher.endpoint, publisher.replay_endpoint, "kv@", receive_batches)
    opened.append(subscriber)
    return subscriber


def page(serial: int, tokens: int = STRIDE) -> PagesPublished:
    return PagesPublished((serial,), None, ((serial + 1000,) * tokens,), None)


def join(publisher: KVEventPublisher, subscriber: Subscriber, batches: Batches) -> int:
    """Publishes until the subscription is in force; returns the number of the first message that came."""
    while not subscriber.live.poll(20):
        publisher.tell(AllPages(()))
        batches.wait()
    _, number, _ = subscriber.receive()
    while subscriber.live.poll(20):
        _, number, _ = subscriber.receive()
    return number


def test_events_come_in_order_under_the_topic(opened: Opened) -> None:
    publisher, subscriber, batches = start(opened)
    last = join(publisher, subscriber, batches)
    index = Index(STRIDE)
    for serial in range(5):
        publisher.tell(page(serial))
        topic, number, batch = subscriber.receive()
        assert (topic, number) == (TOPIC.encode(), last + 1 + serial)
        index.apply(batch)
        assert [tokens for _, tokens in index.stored.values()] == [
            (1000 + s, 1000 + s) for s in range(serial + 1)
        ]


def test_the_first_batch_forgets_what_an_earlier_process_announced(
    opened: Opened,
) -> None:
    _, subscriber, _ = start(opened)
    [(topic, number, batch)] = subscriber.replay(0)
    assert (topic, number) == (TOPIC.encode(), 0)
    index = Index(STRIDE, {7: (None, (1, 2))})
    index.apply(batch)
    assert index.stored == {}


def test_a_subscriber_that_comes_late_follows_a_cache_by_a_replay(
    opened: Opened,
) -> None:
    publisher, subscriber, _ = start(opened)
    cache = TrieCache(6, STRIDE, listener=publisher)
    for tokens, salt in (([1, 2, 3, 4], None), ([1, 2, 5, 6, 7], "s"), ([1, 2, 3, 4, 8, 8], None)):
        lease = cache.acquire(tokens, salt)
        assert cache.reserve(lease, len(tokens))
        cache.publish(lease, tokens)
        cache.release(lease)
    index = Index(STRIDE)
    replayed = subscriber.replay(0)
    for _, _, batch in replayed:
        index.apply(batch)
    assert [number for _, number, _ in replayed] == list(range(len(replayed)))
    assert set(index.stored.values()) == {
        *((None, tokens) for tokens in ((1, 2), (1, 2, 3, 4), (1, 2, 3, 4, 8, 8))),
        *((("s",), tokens) for tokens in ((1, 2), (1, 2, 5, 6))),
    }
    cache.flush()
    for _, _, batch in subscriber.replay(len(replayed)):
        index.apply(batch)
    assert index.stored == {}


def test_a_stalled_subscriber_blocks_nobody_and_sees_a_gap(
    opened: Opened,
) -> None:
    publisher, reader, batches = start(opened, send_batches=2)
    stalled = subscribe(opened, publisher, receive_batches=2)
    last = join(publisher, stalled, batches)
    for serial in range(400):  # 24 MB, more than the sockets' buffers hold
        publisher.tell(page(serial, 20_000))
        batches.wait()
    publisher.tell(PagesWithdrawn((0,)))
    assert [number for _, number, _ in reader.replay(last + 401)] == [last + 401]
    seen = [stalled.receive()[1]]
    while seen[-1] < last + 401:
        if not stalled.live.poll(20):
            publisher.tell(AllPages(()))  # which there is room for again
            batches.wait()
        seen += [stalled.receive()[1]]
    gaps = [(before, after) for before, after in pairwise(seen) if after != before + 1]
    assert gaps
    missed = gaps[0][0] + 1
    assert reader.replay(missed)[0][1] == missed


@pytest.mark.parametrize(
    "frames",
    [[b""], [b"", b""], [b"", b"1"], [b"", bytes(9)], [b"x", bytes(8)], [bytes(8)], [b"", b"", bytes(8)]],
)
def test_malformed_requests_for_a_replay_are_ignored(opened: Opened, frames: list[bytes]) -> None:
    _, subscriber, _ = start(opened)
    subscriber.dealer.send_multipart(frames)
    assert [number for _, number, _ in subscriber.replay(0)] == [0]


def test_a_huge_request_costs_its_sender_the_connection_alone(
    opened: Opened,
) -> None:
    publisher, hostile, _ = start(opened)
    hostile.dealer.send_multipart([b"", bytes(10 << 20)])
    assert [number for _, number, _ in subscribe(opened, publisher).replay(0)] == [0]


@pytest.mark.parametrize("start_number", [1, 10**6, 2**64 - 1])
def test_a_replay_of_what_is_not_there_ends_at_once(opened: Opened, start_number: int) -> None:
    _, subscriber, _ = start(opened)
    assert subscriber.replay(start_number) == []


def test_events_beyond_the_bound_are_not_taken_and_then_made_up_for(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is held while the cache changes more often than there is room for."""
    monkeypatch.setattr(publisher_module, "MAX_WAITING", 3)
    held, go_on = threading.Event(), threading.Event()
    numbers = count()

    def clock() -> float:
        if next(numbers) == 0:
            held.set()
            assert go_on.wait(PATIENCE_MS / 1000)
        return 0.0

    publisher = KVEventPublisher(
        KVEventSettings(kv_events_endpoint=LOOPBACK, kv_events_replay_endpoint=LOOPBACK), STRIDE, clock=clock
    )
    opened.append(publisher)
    assert held.wait(PATIENCE_MS / 1000)
    cache = TrieCache(20, STRIDE, listener=publisher)

    def serve(token: int) -> None:
        lease = cache.acquire([token, token])
        assert cache.reserve(lease, 2)
        cache.publish(lease, [token, token])
        cache.release(lease)

    for token in range(6):
        serve(token)
    assert not publisher.has_room
    go_on.set()
    subscriber = subscribe(opened, publisher)
    subscriber.replay(0)
    serve(6)
    index = Index(STRIDE)
    for _, _, batch in subscriber.replay(0):
        index.apply(batch)
    assert set(index.stored.values()) == {(None, (token, token)) for token in range(7)}


def test_an_endpoint_in_use_or_unknown_is_named(opened: Opened) -> None:
    publisher, _, _ = start(opened)
    for endpoint in (publisher.endpoint, "tcp://no.such.host.invalid:1", "tcp://127.0.0.1"):
        assert endpoint is not None
        with pytest.raises(KVEventsError, match="choose another endpoint") as caught:
            KVEventPublisher(KVEventSettings(kv_events_endpoint=endpoint), STRIDE)
        assert endpoint in str(caught.value)
        with pytest.raises(KVEventsError):
            KVEventPublisher(
                KVEventSettings(kv_events_endpoint=LOOPBACK, kv_events_replay_endpoint=endpoint), STRIDE
            )


def test_closing_publishes_what_waits_and_frees_the_endpoints(
    opened: Opened,
) -> None:
    publisher, _, _ = start(opened)
    endpoint = publisher.endpoint
    assert endpoint is not None
    publisher.close()
    publisher.close()
    opened.append(KVEventPublisher(KVEventSettings(kv_events_endpoint=endpoint), STRIDE))


def test_a_bug_in_the_thread_is_logged_and_the_engine_goes_on(
    opened: Opened,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher_module, "MAX_WAITING", 50)
    publisher, _, _ = start(opened)
    unknown: PageEvent = PagesWithdrawn((99,))
    with caplog.at_level(logging.ERROR):
        publisher.tell(unknown)
        publisher._thread.join(PATIENCE_MS / 1000)
    assert "not published any more" in caplog.text
    cache = TrieCache(9, STRIDE, listener=publisher)
    for token in range(100):
        lease = cache.acquire([token, token])
        assert cache.reserve(lease, 2)
        cache.publish(lease, [token, token])
        cache.release(lease)
    cache.check_integrity()
    assert len(publisher._waiting) <= 50


@given(st.lists(st.integers(0, 20), max_size=30), st.integers(1, 6), st.integers(1, 40), st.integers(-1, 32))
def test_the_last_batches_are_kept_within_both_bounds(
    sizes: list[int], max_batches: int, max_bytes: int, sequence: int
) -> None:
    buffer = ReplayBuffer(max_batches, max_bytes)
    for number, size in enumerate(sizes):
        buffer.append(number, bytes(size))
    expected = [(number, bytes(size)) for number, size in enumerate(sizes)]
    while len(expected) > 1 and (
        len(expected) > max_batches or sum(len(batch) for _, batch in expected) > max_bytes
    ):
        expected.pop(0)
    assert list(buffer.since(0)) == expected
    assert list(buffer.since(sequence)) == [entry for entry in expected if entry[0] >= sequence]
