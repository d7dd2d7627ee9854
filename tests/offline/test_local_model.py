"""Places against a brute-force model: first come, first served, and never more than there are."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Send

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.offline.local_model import (
    COMPLETIONS,
    MAX_ALONE,
    Answered,
    App,
    LocalModel,
    Places,
    calling,
)
from shortfin_apps.llm.offline.settings import local_config
from shortfin_apps.llm.serving.server.model_loading import Loaded

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


class Model:
    """Who has places, and who waits, by number."""

    def __init__(self, total: int) -> None:
        self.total = self.free = total
        self.inside: dict[int, int] = {}
        self.waiting: list[tuple[int, int]] = []

    def come(self, who: int, count: int) -> None:
        self.waiting.append((who, min(count, self.total)))
        self.hand_out()

    def leave(self, who: int) -> None:
        """Also by giving up while waiting."""
        self.waiting = [each for each in self.waiting if each[0] != who]
        self.free += self.inside.pop(who, 0)
        self.hand_out()

    def hand_out(self) -> None:
        while self.waiting and self.waiting[0][1] <= self.free:
            who, count = self.waiting.pop(0)
            self.inside[who] = count
            self.free -= count


Step = tuple[int, bool, bool]  # places or whom, whether one comes, whether the loop runs in between


async def follow(total: int, steps: Sequence[Step]) -> None:
    places, model = Places(total), Model(total)
    inside: set[int] = set()
    tasks: dict[int, asyncio.Task[None]] = {}

    async def stay(who: int, count: int) -> None:
        async with places.taken(count):
            inside.add(who)
            try:
                await asyncio.Event().wait()
            finally:
                inside.discard(who)

    async def settle() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    for number, (value, comes, settles) in enumerate(steps):
        if comes:
            tasks[number] = asyncio.ensure_future(stay(number, value))
            await asyncio.sleep(0)  # it asks
            model.come(number, value)
        elif tasks:
            who = sorted(tasks)[value % len(tasks)]
            tasks.pop(who).cancel()
            model.leave(who)
        if settles:
            await settle()
            assert inside == set(model.inside)
    for task in tasks.values():
        task.cancel()
    await settle()
    assert not inside
    async with asyncio.timeout(1), places.taken(total):  # all are back
        pass


@given(
    total=st.integers(1, 5),
    steps=st.lists(st.tuples(st.integers(1, 7), st.booleans(), st.just(True)), max_size=30),
)
def test_places_are_given_in_order(total: int, steps: list[Step]) -> None:
    asyncio.run(follow(total, steps))


@given(steps=st.lists(st.tuples(st.integers(1, 7), st.booleans(), st.just(False)), max_size=30))
def test_no_place_is_lost_when_many_come_and_go_in_one_turn(steps: list[Step]) -> None:
    asyncio.run(follow(3, steps))


async def test_whoever_was_refused_comes_again_when_another_leaves() -> None:
    places = Places(3)
    async with places.taken(1):
        assert places.are_all_free_but(1)
        async with places.taken(1):
            assert not places.are_all_free_but(1)
            num_left = places.num_left
            waiting = asyncio.ensure_future(places.another_leaves(num_left, 60.0))
            await asyncio.sleep(0)
            assert not waiting.done()
        await waiting
        await places.another_leaves(num_left, 60.0)  # it has left in the meantime


async def test_nobody_is_waited_for_forever() -> None:
    places = Places(1)
    await places.another_leaves(places.num_left, 0.0)


@asynccontextmanager
async def running(artifact: Artifact, **settings: Any) -> AsyncIterator[LocalModel]:
    config = local_config(artifact.vmfb.parent, {"token_budget": 320, **settings}, lambda note: None)
    model = LocalModel.load(config)
    async with model.running():
        yield model


def body(prompt: Any, **fields: Any) -> bytes:
    return json.dumps({"prompt": prompt, "max_tokens": 2, **fields}).encode()


def statuses(answers: list[Answered]) -> set[int]:
    return {answer.status for answer in answers}


async def test_requests_of_several_sequences_wait_until_all_of_them_fit(tiny_artifact: Artifact) -> None:
    async with running(tiny_artifact, max_running=2, max_queue=2) as model:
        assert model.max_requests == 4
        requests = [model.post(COMPLETIONS, body("x", n=3), 3) for _ in range(10)]
        assert statuses(await asyncio.gather(*requests)) == {200}
        [too_many] = await asyncio.gather(model.post(COMPLETIONS, body("x", n=5), 5))
        assert too_many.status == 400
        assert b"5 sequences in one request can never fit" in too_many.body


async def test_a_count_that_is_too_small_only_makes_requests_come_again(tiny_artifact: Artifact) -> None:
    async with running(tiny_artifact, max_running=2, max_queue=2) as model:
        requests = [model.post(COMPLETIONS, body("x", n=3), 1) for _ in range(10)]
        assert statuses(await asyncio.gather(*requests)) == {200}


class Full:
    """An application that has no room for the first `times` requests."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.num_requests = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        self.num_requests += 1
        await asyncio.sleep(0)
        status = 429 if self.num_requests <= self.times else 200
        await send({"type": "http.response.start", "status": status, "headers": [(b"retry-after", b"0")]})
        await send({"type": "http.response.body", "body": b""})


def over(app: Full, max_requests: int) -> LocalModel:
    engine: Any = SimpleNamespace(max_requests=max_requests)
    return LocalModel("full", app, Loaded(engine, engine))


async def test_requests_that_are_all_refused_do_not_wait_for_each_other() -> None:
    app = Full(times=30)
    model = over(app, max_requests=10)
    assert statuses(await asyncio.gather(*(model.post("/", b"") for _ in range(20)))) == {200}
    assert app.num_requests == 50


async def test_a_request_that_is_refused_although_it_is_alone_is_so_in_the_end() -> None:
    app = Full(times=100)
    assert (await over(app, max_requests=10).post("/", b"")).status == 429
    assert app.num_requests == 1 + MAX_ALONE


async def test_an_answer_has_the_id_of_its_request(tiny_artifact: Artifact) -> None:
    async with running(tiny_artifact) as model:
        answered = await model.post(COMPLETIONS, body("x"))
        assert json.loads(answered.body)["id"] == f"cmpl-{answered.request_id}"
        assert model.healthy
    assert not model.healthy


async def test_leaving_a_stream_gives_back_its_place(tiny_artifact: Artifact) -> None:
    async with running(tiny_artifact, max_running=1, max_queue=1) as model:
        for _ in range(4):
            async with model.stream(COMPLETIONS, body("x", stream=True, max_tokens=900)) as answer:
                assert answer.status == 200
        assert (await model.post(COMPLETIONS, body("x"))).status == 200


@pytest.mark.parametrize("key", ["SHORTFIN_LLM_API_KEY", "SHORTFIN_LLM_ADMIN_API_KEY"])
async def test_a_servers_keys_are_not_asked_for(
    tiny_artifact: Artifact, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv(key, "secret")
    async with running(tiny_artifact) as model:
        assert (await model.post(COMPLETIONS, body("x"))).status == 200
