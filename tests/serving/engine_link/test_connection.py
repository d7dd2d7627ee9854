from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.serving.engine_link.connection import LENGTH, Connection, exchange
from shortfin_apps.llm.serving.engine_link.messages import (
    Abort,
    Admitted,
    FromApi,
    FromEngine,
    Prepared,
    decoder_from_api,
    decoder_from_engine,
    encode,
)

LONG = "x" * 1_000_000


def connection(
    received: list[FromApi],
    on_lost: Callable[[], None] = lambda: None,
    on_free: Callable[[], None] = lambda: None,
) -> Connection[FromApi]:
    return Connection(decoder_from_api(), received.append, on_lost=on_lost, on_free=on_free)


def frame(request_id: str) -> bytes:
    text = encode(Abort(request_id))
    return LENGTH.pack(len(text)) + text


@given(ids=st.lists(st.text(max_size=5), max_size=6), cuts=st.lists(st.integers(1, 9), min_size=1))
def test_messages_arrive_however_their_bytes_do(ids: list[str], cuts: list[int]) -> None:
    received: list[FromApi] = []
    reader = connection(received)
    data = b"".join(map(frame, ids))
    sizes = iter(cuts * len(data))
    while data:
        size = next(sizes)
        reader.data_received(data[:size])
        data = data[size:]
    assert received == [Abort(each) for each in ids]


async def test_what_is_sent_before_the_connection_opens_goes_out_with_it() -> None:
    ours, theirs = socket.socketpair()
    received: list[FromApi] = []
    lost = asyncio.Event()
    reader = connection(received, on_lost=lost.set)
    writer: Connection[FromEngine] = Connection(decoder_from_engine(), lambda _: None, on_lost=lambda: None)
    writer.send(Abort("early"))
    await writer.open(ours)
    await reader.open(theirs)
    writer.close()
    writer.close()
    await lost.wait()
    assert received == [Abort("early")]
    reader.send(Admitted("nobody"))  # to nobody: nothing happens
    assert reader.is_lost
    while not writer.is_lost:
        await asyncio.sleep(0)


async def test_a_reader_that_stops_holds_the_writer_up_and_then_frees_it() -> None:
    ours, theirs = socket.socketpair()
    free = asyncio.Event()
    writer = connection([], on_free=free.set)
    await writer.open(ours)
    while not writer.is_held_up:
        writer.send(Abort(LONG))
    theirs.setblocking(False)
    loop = asyncio.get_running_loop()
    reading = asyncio.create_task(_read_all(loop, theirs))
    await free.wait()
    assert not writer.is_held_up
    writer.close()
    await reading
    while not writer.is_lost:
        await asyncio.sleep(0)


async def _read_all(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    with sock:
        while await loop.sock_recv(sock, 1 << 20):
            pass


def test_an_exchange_needs_no_event_loop() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        text = encode(Admitted("a"))
        threading.Thread(target=theirs.sendall, args=(LENGTH.pack(len(text)) + text,)).start()
        assert exchange(ours, Prepared(), decoder_from_engine()) == Admitted("a")


def test_an_exchange_with_nobody_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.recv(0)
        theirs.shutdown(socket.SHUT_WR)
        with theirs, pytest.raises(EOFError):
            exchange(ours, Prepared(), decoder_from_engine())
