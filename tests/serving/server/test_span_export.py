from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO

import pytest
import requests
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor

from shortfin_apps.llm.serving.server import span_export
from shortfin_apps.llm.serving.server.span_export import (
    MAX_ANSWER_BYTES,
    MAX_ANSWER_S,
    BoundedProvider,
    read_bounded,
)
from shortfin_apps.llm.serving.server.tracing import trace_provider
from tests.components.stepped_engine import SteppedClock
from tests.serving.server.settings import parse

pytestmark = pytest.mark.timeout(20)


class Raw:
    """The body of an answer without end; each read takes `read_s`."""

    def __init__(self, clock: SteppedClock, read_s: float) -> None:
        self.clock, self.read_s = clock, read_s
        self.num_read = 0
        self.is_closed = False

    def read(self, size: int) -> bytes:
        self.clock.now_s += self.read_s
        self.num_read += size
        return b"x" * size

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    ("read_s", "num_bytes"), [(0.0, MAX_ANSWER_BYTES), (MAX_ANSWER_S / 4, 4)], ids=["endless", "dripping"]
)
def test_an_answer_is_read_up_to_a_size_and_a_time(read_s: float, num_bytes: int) -> None:
    clock, response = SteppedClock(), requests.Response()
    response.raw = raw = Raw(clock, read_s)
    read_bounded(response, clock=clock)
    assert (raw.num_read, raw.is_closed) == (num_bytes, True)
    assert response.content == b"x" * num_bytes


def test_a_short_answer_is_whole_and_keeps_its_connection() -> None:
    response = requests.Response()
    response.raw = raw = BytesIO(b"refused")
    read_bounded(response)
    assert response.text == "refused"
    assert not raw.closed


@contextmanager
def endless_collector() -> Iterator[tuple[str, threading.Event]]:
    """Its URL, and whether the exporter hung up on its answer, which never ends."""
    hung_up = threading.Event()

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
            try:
                while True:
                    connection.sendall(b"x" * (1 << 16))
            except OSError:
                hung_up.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", hung_up
        thread.join()


def test_the_exporter_hangs_up_on_an_answer_without_end() -> None:
    with endless_collector() as (url, hung_up):
        provider = trace_provider(parse("DIR", "--otlp-endpoint", url))
        assert provider is not None
        provider.get_tracer("test").start_span("one").end()
        assert provider.force_flush()
        assert hung_up.wait(10)
        provider.shutdown()


def test_the_end_does_not_wait_for_a_collector(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(span_export, "LAST_SPANS_S", 0.0)
    answered = threading.Event()

    class Waiting(SpanProcessor):
        def shutdown(self) -> None:
            answered.wait()

    provider = BoundedProvider(Resource.create())
    provider.add_span_processor(Waiting())
    with caplog.at_level(logging.WARNING):
        provider.shutdown()
        provider.shutdown()
    assert caplog.text.count("the last spans are lost") == 1
    answered.set()
    assert provider._shutdown_done.wait(10)


def test_a_credential_provider_of_opentelemetry_gives_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = requests.Session()

    class Found:
        def load(self) -> object:
            return lambda: theirs

    monkeypatch.setattr(span_export, "entry_points", lambda group, name: [Found()] if name == "mine" else [])
    for variable in span_export.CREDENTIAL_VARIABLES:
        assert span_export.bounded_session({variable: "mine"}) is theirs
        assert span_export.bounded_session({variable: "missing"}) is None
    assert read_bounded in theirs.hooks["response"]
    ours = span_export.bounded_session({})
    assert ours is not None
    assert ours is not theirs
