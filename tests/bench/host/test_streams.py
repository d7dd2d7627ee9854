from __future__ import annotations

import socket

import pytest

from bench.host.streams import OUTPUT_TOKENS, _Client, stream_tokens


def test_every_token_arrives() -> None:
    figures = stream_tokens(2, step_ms=1.0)
    assert figures.errors == 0
    assert figures.tokens_per_s > 0
    assert 1 <= figures.tokens_per_chunk < OUTPUT_TOKENS
    assert min(figures.loop_us, figures.engine_us) > 0


@pytest.mark.parametrize("size", [1, 3, 8, 100])
def test_events_are_counted_however_they_are_cut(size: int) -> None:
    data = b': keep-alive\n\ndata: {"a":1}\n\ndata: {"b":"data"}\n\ndata: [DONE]\n\n'
    theirs, ours = socket.socketpair()
    with theirs, ours:
        client = _Client(ours)
        for begin in range(0, len(data), size):
            theirs.sendall(data[begin : begin + size])
            client.receive()
    assert (client.num_events, client.has_ended) == (2, True)
