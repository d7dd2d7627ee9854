from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from shortfin_apps.llm.client.errors import ConnectionFailedError
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.offline.batch.requests import BatchRequest
from shortfin_apps.llm.offline.batch.server_sender import ServerSender
from shortfin_apps.llm.offline.local_model import Answered
from tests.scripted_server import ScriptedServer, says

PATH = "/v1/completions"
REQUEST = BatchRequest("a", PATH, b'{"prompt":  "a"}', 1)


class Sleeps(list[float]):
    async def __call__(self, seconds: float) -> None:
        self.append(seconds)


def sender(url: str, sleeps: Sleeps | None = None, key: str | None = None) -> ServerSender:
    return ServerSender(
        url,
        key,
        timeout_s=10.0,
        max_retries=3,
        concurrency=2,
        sleep=sleeps if sleeps is not None else Sleeps(),
        now=lambda: 0.0,
        random=lambda: 0.0,
    )


async def test_a_request_goes_to_its_path_with_the_key(server: ScriptedServer) -> None:
    server.on(PATH, says({"text": "x"}, X_Request_Id="7"))
    async with sender(f"{server.url}/v1", key="secret") as sending:
        assert await sending.send(REQUEST) == Answered(200, b'{"text":"x"}', "7")
    [seen] = server.seen
    assert (seen.path, seen.body, seen.headers["authorization"]) == (PATH, {"prompt": "a"}, "Bearer secret")


async def test_an_answer_that_is_no_success_is_an_answer(server: ScriptedServer) -> None:
    server.on(PATH, says({"error": "no"}, 400))
    async with sender(server.url) as sending:
        assert (await sending.send(REQUEST)).status == 400
    assert len(server.seen) == 1


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_what_is_not_taken_now_is_sent_again(server: ScriptedServer, status: int) -> None:
    server.on(PATH, says({}, status, Retry_After="2"), says({}, status), says({"text": "x"}))
    sleeps = Sleeps()
    async with sender(server.url, sleeps) as sending:
        assert (await sending.send(REQUEST)).status == 200
    assert sleeps == [2.0, 0.25]


async def test_an_answer_that_is_not_in_its_encoding_is_an_error(server: ScriptedServer) -> None:
    server.on(PATH, says({"text": "x"}, Content_Encoding="gzip"))
    async with sender(server.url) as sending:
        with pytest.raises(ConnectionFailedError, match="does not answer"):
            await sending.send(REQUEST)


async def test_a_server_that_stays_busy_is_given_up(server: ScriptedServer) -> None:
    server.on(PATH, says({}, 503))
    async with sender(server.url) as sending:
        assert (await sending.send(REQUEST)).status == 503
    assert len(server.seen) == 4


async def test_a_busy_server_is_waited_for_as_long_as_it_answers_others(server: ScriptedServer) -> None:
    server.on(PATH, *[says({}, 429), says({"text": "x"})] * 9, says({"text": "x"}))
    async with sender(server.url) as sending:
        answered = await asyncio.gather(*(sending.send(REQUEST) for _ in range(10)))
    assert [each.status for each in answered] == [200] * 10


async def test_an_answer_lost_with_its_connection_is_asked_for_again(server: ScriptedServer) -> None:
    def broken(_: Request, __: Any) -> Response:
        return Response(b"{", headers={"content-length": "100"})

    server.on(PATH, broken, says({"text": "x"}))
    async with sender(server.url) as sending:
        assert (await sending.send(REQUEST)).status == 200


async def test_a_server_that_is_not_there_is_named() -> None:
    sleeps = Sleeps()
    async with sender("http://127.0.0.1:1", sleeps) as sending:
        with pytest.raises(ConnectionFailedError, match=r"http://127.0.0.1:1 does not answer"):
            await sending.send(REQUEST)
    assert len(sleeps) == 3


def test_an_address_must_be_one() -> None:
    with pytest.raises(InvalidRequestError, match="must begin with http"):
        sender("127.0.0.1")
