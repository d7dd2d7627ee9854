"""Publishes KV events over ZeroMQ, as vLLM does, from a separate thread.

A PUB socket sends (topic, sequence number, batch). Sequence numbers count batches from 0, in 8 bytes,
big-endian. A subscriber that reads too slowly misses batches, and sees a gap in the sequence numbers. The
subscriber may send a message (empty, number) to the ROUTER socket to request all batches from this number on.
The reply is (empty, topic, number, batch) for each batch, and (empty, empty, -1, empty) at the end.

    engine thread                        this thread
    tell ── deque, one byte to wake ───> hash, encode, send, keep for replays
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import zmq

from shortfin_apps.llm.components.kv_events.messages import EventEncoder
from shortfin_apps.llm.components.kv_events.options import KVEventsError, KVEventSettings
from shortfin_apps.llm.components.kvcache.events import AllPages, PageEvent

MAX_BATCHES = 10_000  # vLLM's `buffer_steps`
MAX_BYTES = 32 << 20


class ReplayBuffer:
    """The latest batches with their sequence numbers, within limits of number and size.

    Drops the oldest batches. Keeps the newest batch even if it alone exceeds `max_bytes`.
    """

    def __init__(self, max_batches: int = MAX_BATCHES, max_bytes: int = MAX_BYTES) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._batches: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0

    def append(self, sequence: int, batch: bytes) -> None:
        self._batches.append((sequence, batch))
        self._num_bytes += len(batch)
        while len(self._batches) > 1 and self._is_over():
            _, dropped = self._batches.popleft()
            self._num_bytes -= len(dropped)

    def since(self, sequence: int) -> Iterator[tuple[int, bytes]]:
        """Iterate over the buffered batches from this sequence number on."""
        return ((number, batch) for number, batch in self._batches if number >= sequence)

    def _is_over(self) -> bool:
        return len(self._batches) > self._max_batches or self._num_bytes > self._max_bytes


logger = logging.getLogger(__name__)

MAX_WAITING = 10_000  # events not published yet
MAX_EVENTS = 1_000  # per batch
SEND_BATCHES = 1_000  # batches queued for a subscriber; further batches are dropped for this subscriber
MAX_REQUEST_BYTES = 1024  # limit for a replay request and a subscription
NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
CLOSE_S = 1.0


class KVEventPublisher:
    """A PageListener that publishes events in its own thread until `close`.

    The first batch reports that no page is published, because routers may remember pages of an earlier
    process. `clock` returns Unix time, and is called once per batch. `hash_seed` is vLLM's PYTHONHASHSEED;
    with None, hashes differ from all other processes' hashes. Raises KVEventsError if an endpoint cannot be
    bound.
    """

    def __init__(
        self,
        settings: KVEventSettings,
        page_tokens: int,
        default_topic: str = "",
        *,
        hash_seed: str | None = None,
        send_batches: int = SEND_BATCHES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        assert settings.kv_events_endpoint is not None
        self.topic = settings.kv_events_topic or default_topic
        self._clock = clock
        self._encoder = EventEncoder(page_tokens, hash_seed)
        self._kept = ReplayBuffer()
        self._next_number = 0
        self._context = zmq.Context()
        self._replies: zmq.Socket[bytes] | None = None
        try:
            self._pub = self._bind(zmq.PUB, settings.kv_events_endpoint, send_batches)
            if settings.kv_events_replay_endpoint is not None:
                self._replies = self._bind(zmq.ROUTER, settings.kv_events_replay_endpoint, MAX_BATCHES + 1)
        except KVEventsError:
            self._context.destroy(linger=0)
            raise
        self.endpoint, self.replay_endpoint = _address(self._pub), _address(self._replies)
        self._waiting: deque[PageEvent] = deque()
        self._is_awake = self._is_closing = False
        self._sleeper, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)
        self.tell(AllPages(()))
        self._thread.start()

    @property
    def has_room(self) -> bool:
        return len(self._waiting) < MAX_WAITING

    def tell(self, event: PageEvent) -> None:
        self._waiting.append(event)
        if not self._is_awake:
            self._is_awake = True
            self._waker.send(b"\0")

    def close(self) -> None:
        """Publish waiting events, then close the sockets. Callers must not `tell` further events."""
        if self._is_closing:
            return
        self._is_closing = True
        self._waker.send(b"\0")
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._sleeper.close()
            self._waker.close()

    def _bind(self, kind: int, endpoint: str, send_batches: int) -> zmq.Socket[bytes]:
        opened = self._context.socket(kind)
        opened.setsockopt(zmq.LINGER, 0)
        opened.setsockopt(zmq.SNDHWM, send_batches)
        opened.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        opened.setsockopt(zmq.IPV6, 1)
        try:
            opened.bind(endpoint)
        except zmq.ZMQError as error:
            raise KVEventsError(
                f"KV events cannot be published at {endpoint} ({error.strerror}); choose another endpoint, "
                "such as tcp://127.0.0.1:5557"
            ) from error
        return opened

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._sleeper, zmq.POLLIN)
            if self._replies is not None:
                poller.register(self._replies, zmq.POLLIN)
            while not self._is_closing:
                ready = dict(poller.poll())
                if self._sleeper.fileno() in ready:
                    self._sleeper.recv(16)
                self._publish_waiting()
                if self._replies in ready:
                    self._answer_replay()
            self._publish_waiting()
        except Exception:
            logger.exception("KV events are not published any more")
        finally:
            self._context.destroy(linger=0)

    def _publish_waiting(self) -> None:
        self._is_awake = False  # before the loop, so that later events wake the thread again
        while self._waiting:
            count = min(len(self._waiting), MAX_EVENTS)
            self._publish([self._waiting.popleft() for _ in range(count)])

    def _publish(self, events: Sequence[PageEvent]) -> None:
        number, self._next_number = self._next_number, self._next_number + 1
        batch = self._encoder.encode(self._clock(), events)
        self._kept.append(number, batch)
        self._pub.send_multipart((self.topic.encode(), number.to_bytes(NUMBER_BYTES, "big"), batch))

    def _answer_replay(self) -> None:
        """Answer a replay request. If the subscriber does not read, batches beyond its buffer are dropped."""
        assert self._replies is not None
        frames = self._replies.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != NUMBER_BYTES:
            logger.debug("a request for a replay of KV events is ignored: it is not (empty, 8 bytes)")
            return
        subscriber = frames[0]
        for number, batch in self._kept.since(int.from_bytes(frames[2], "big")):
            self._replies.send_multipart(
                (subscriber, b"", self.topic.encode(), number.to_bytes(NUMBER_BYTES, "big"), batch)
            )
        self._replies.send_multipart((subscriber, b"", b"", END, b""))


def _address(opened: zmq.Socket[bytes] | None) -> str | None:
    """Return the endpoint that a socket is bound to, with its actual port; None without a socket."""
    if opened is None:
        return None
    endpoint = opened.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.decode().rstrip("\0")
