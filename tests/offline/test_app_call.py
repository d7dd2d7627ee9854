from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from shortfin_apps.llm.offline.app_call import App, Message, calling

Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
START: Message = {"type": "http.response.start", "status": 201, "headers": [(b"x-a", b"b")]}


def piece(data: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def whole(app: App, body: bytes = b"") -> tuple[int, bytes]:
    async with calling(app, "/path", body) as answer:
        return answer.status, await answer.whole()


async def test_the_application_sees_the_request() -> None:
    async def echo(scope: Message, receive: Receive, send: Send) -> None:
        assert (scope["type"], scope["method"], scope["path"]) == ("http", "POST", "/path")
        assert (b"content-length", b"3") in scope["headers"]
        received = await receive()
        await send(START)
        await send(piece(received["body"], more=received["more_body"]))

    assert await whole(echo, b"abc") == (201, b"abc")


async def test_pieces_come_before_the_answer_ends() -> None:
    goes_on = asyncio.Event()

    async def slow(scope: Message, receive: Receive, send: Send) -> None:
        await send(START)
        await send(piece(b"1"))
        await goes_on.wait()
        await send(piece(b"2", more=False))

    async with calling(slow, "/", b"") as answer:
        assert answer.headers == {"x-a": "b"}
        pieces = answer.pieces()
        assert await anext(pieces) == b"1"
        goes_on.set()
        assert [each async for each in pieces] == [b"2"]


async def test_sending_never_waits_for_a_reader() -> None:
    """The routes send outside of a task; see StreamedBody."""

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await send(START)
        for _ in range(10_000):
            with pytest.raises(StopIteration):
                send(piece(b"x")).__await__().__next__()
        await send(piece(b"", more=False))

    assert await whole(app) == (201, b"x" * 10_000)


async def test_leaving_early_ends_the_application() -> None:
    ended = asyncio.Event()

    async def endless(scope: Message, receive: Receive, send: Send) -> None:
        try:
            await send(START)
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with calling(endless, "/", b""):
        assert not ended.is_set()
    assert ended.is_set()


async def test_a_caller_is_there_until_the_answer_ends() -> None:
    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await receive()
        gone = asyncio.ensure_future(receive())
        await asyncio.sleep(0)
        assert not gone.done()
        await send(START)
        await send(piece(b"", more=False))
        assert (await gone)["type"] == "http.disconnect"

    assert await whole(app) == (201, b"")


async def test_an_application_that_raises_has_answered_500(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Message, receive: Receive, send: Send) -> None:
        raise KeyError("bug")

    with caplog.at_level(logging.ERROR):
        assert await whole(broken) == (500, b"")
    assert "KeyError: 'bug'" in caplog.text
