from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message, Receive, Send

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.offline.local_model import COMPLETIONS, MAX_ALONE, Answered, LocalModel
from shortfin_apps.llm.offline.settings import local_config
from shortfin_apps.llm.serving.server.model_loading import Loaded


@asynccontextmanager
async def running(artifact: Artifact, **settings: Any) -> AsyncIterator[LocalModel]:
    config = local_config(artifact.vmfb.parent, {"tune": False, **settings}, lambda note: None)
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
