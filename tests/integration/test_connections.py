"""Misbehaving connections, against a server process and its engine."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import orjson
import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from tests.integration.server_process import PATIENCE_S, Service, start, stop

pytestmark = pytest.mark.slow

NUM_SEQUENCES, NUM_TOKENS = 16, 900
GET_HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture(scope="module")
def service(tiny_artifact: Artifact) -> Iterator[Service]:
    running = start(tiny_artifact)
    yield running
    assert stop(running) == 0


def connect(service: Service) -> socket.socket:
    """A connection of its own; nothing on it takes longer than PATIENCE_S."""
    url = urlsplit(service.url)
    return socket.create_connection((url.hostname, url.port), timeout=PATIENCE_S)


def until(holds: Callable[[], bool], what: str) -> None:
    """Waits until `holds()`; after PATIENCE_S it fails, naming `what`."""
    give_up = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up, f"for {PATIENCE_S:g} s not: {what}"


def generation(num_sequences: int, num_tokens: int) -> bytes:
    params = {"max_completion_tokens": num_tokens, "ignore_eos": True, "n": num_sequences}
    body = orjson.dumps({"input_ids": [5, 6, 7], "sampling_params": params})
    head = b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def test_pipelined_requests_of_a_disconnected_client_are_aborted(service: Service) -> None:
    before = service.metric("vllm:generation_tokens_total")
    with connect(service) as client:
        client.sendall(generation(NUM_SEQUENCES, NUM_TOKENS))
        until(lambda: service.metric("vllm:num_requests_running") == NUM_SEQUENCES, "all of them run")
        client.sendall(GET_HEALTH)
    until(lambda: service.metric("vllm:num_requests_running") == 0, "none of them runs any more")
    assert service.metric("vllm:generation_tokens_total") - before < NUM_SEQUENCES * NUM_TOKENS
    assert service.metric("shortfin_llm:pages_leased") == 0
