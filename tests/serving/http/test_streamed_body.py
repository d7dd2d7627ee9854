from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from shortfin_apps.llm.serving.http.streaming import KEEP_ALIVE, KeepAlive, StreamedBody

START: Message = {"type": "http.response.start", "status": 200, "headers": []}


class Client:
    """An ASGI server's side: records what was sent; while `reads` is cleared, `send` waits."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.num_held_up = 0
        self.body = StreamedBody(START, self.send, self.on_held_up)

    async def send(self, message: Message) -> None:
        while not self.reads.is_set():
            await self.reads.wait()
        self.messages.append(message)

    def on_held_up(self) -> None:
        self.num_held_up += 1

    @property
    def data(self) -> bytes:
        assert self.messages[0] == START
        assert all(message["type"] == "http.response.body" for message in self.messages[1:])
        return b"".join(message["body"] for message in self.messages[1:])


async def test_a_piece_is_sent_in_the_call_that_has_it() -> None:
    client = Client()
    assert not client.body.has_begun
    client.body.write(b"a")
    client.body.write(b"b")
    assert (client.data, client.body.has_begun, client.num_held_up) == (b"ab", True, 0)
    await client.body.end(b"c")
    assert [message.get("more_body") for message in client.messages] == [None, True, True, False]
    assert not client.body.is_free


async def test_a_piece_that_the_client_does_not_read_is_held_up() -> None:
    client = Client()
    client.body.write(b"a")
    client.reads.clear()
    client.body.write(b"b")
    assert (client.data, client.body.is_free, client.num_held_up) == (b"a", False, 1)
    with pytest.raises(AssertionError, match="has not been sent"):
        client.body.write(b"c")
    rest = asyncio.create_task(client.body.held_up())
    await asyncio.sleep(0)
    assert not rest.done()
    client.reads.set()
    await rest
    assert client.body.is_free
    client.body.write(b"c")
    assert client.data == b"abc"


async def test_a_status_can_be_held_up() -> None:
    client = Client()
    client.reads.clear()
    client.body.write(b"a")
    assert client.messages == []
    client.reads.set()
    await client.body.held_up()
    assert client.data == b"a"


async def test_a_closed_body_sends_nothing_more() -> None:
    client = Client()
    client.reads.clear()
    client.body.write(b"a")
    client.body.close()
    client.reads.set()
    await asyncio.sleep(0)
    assert (client.messages, client.body.is_free) == ([], False)


@given(st.lists(st.booleans(), max_size=20))
async def test_pieces_arrive_once_and_in_order_however_the_client_reads(reads: list[bool]) -> None:
    client = Client()
    written = b""
    for number, does_read in enumerate(reads):
        if does_read:
            client.reads.set()
            await client.body.held_up()
        else:
            client.reads.clear()
        if client.body.is_free:
            client.body.write(piece := b"%d " % number)
            written += piece
    client.reads.set()
    await client.body.held_up()
    await client.body.end(b"end")
    assert client.data == written + b"end"


async def test_comments_are_sent_until_it_is_stopped() -> None:
    client = Client()
    ticker = KeepAlive(client.body, 0)  # at every turn of the loop
    async with asyncio.timeout(10):
        while len(client.messages) < 4:
            await asyncio.sleep(0)
    ticker.stop()
    num_sent = len(client.messages)
    assert client.data == KEEP_ALIVE * (num_sent - 1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(client.messages) == num_sent


async def test_no_comment_is_sent_once_the_end_is_under_way() -> None:
    client = Client()
    client.body.write(b"a")
    client.reads.clear()
    ending = asyncio.create_task(client.body.end(b"b"))
    await asyncio.sleep(0)
    ticker = KeepAlive(client.body, 0.0001)
    for _ in range(20):
        await asyncio.sleep(0.0001)
    client.reads.set()
    await ending
    ticker.stop()
    assert client.data == b"ab"
