from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shortfin_apps.llm.serving.api.page.assets import PATHS
from shortfin_apps.llm.serving.api.page.feed import MAX_READERS
from shortfin_apps.llm.serving.api.page.routes import EVENTS
from shortfin_apps.llm.serving.http.auth import KeyRing
from tests.serving.api.harness import BASE_URL, TOKENIZER, Harness
from tests.serving.api.loopback import Loopback, ready_server
from tests.serving.api.scripted_engine import forever

ROOT, USER = {"authorization": "Bearer root"}, {"authorization": "Bearer user"}

pytestmark = pytest.mark.timeout(60)


class Events:
    """The events of a feed, one after the other."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines

    async def next(self) -> tuple[str, Any]:
        name, data = "message", None
        async for line in self._lines:
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                data = json.loads(line.removeprefix("data: "))
            elif not line and data is not None:
                return name, data
        raise EOFError


@contextlib.asynccontextmanager
async def reading(server: Loopback, headers: dict[str, str] | None = None) -> AsyncIterator[Events]:
    async with server.client.stream("GET", EVENTS, headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        yield Events(response.aiter_lines())


async def test_a_feed_begins_with_what_the_server_is_and_goes_on_with_snapshots() -> None:
    async with ready_server() as server, reading(server) as events:
        name, about = await events.next()
        assert name == "about"
        assert about["model"] == "tiny"
        assert (about["page_tokens"], about["sees_all"], about["is_admin"]) == (16, True, False)
        ats = []
        for _ in range(3):
            name, snapshot = await events.next()
            assert name == "message"
            ats.append(snapshot["at"])
        assert ats == sorted(ats)
        assert snapshot["counters"]["generation_tokens"] == 13
        assert snapshot["pages"] == {"total": 10, "free": 5, "cached": 1, "leased": 4}


async def test_the_engine_is_left_alone_when_the_last_page_is_closed() -> None:
    async with ready_server() as server:
        assert server.engine.looks == []
        async with reading(server) as events:
            await events.next()
            await events.next()
        feed = server.server.config.app.state.page.feed  # type: ignore[union-attr]
        while feed.num_readers:
            await asyncio.sleep(0)
        looks = len(server.engine.looks)
        for _ in range(5):
            await server.client.get("/health")
        assert len(server.engine.looks) == looks


async def test_a_client_that_leaves_at_once_keeps_no_place() -> None:
    harness = Harness()
    scope = {
        "type": "http", "method": "GET", "path": EVENTS, "raw_path": EVENTS.encode(), "headers": [],
        "query_string": b"", "scheme": "http", "server": ("test", 80), "http_version": "1.1",
    }  # fmt: skip
    received: list[Any] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Any:
        return received.pop() if received else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    for _ in range(2 * MAX_READERS):
        await harness.app(scope, receive, send)
    assert harness.app.state.page.feed.num_readers == 0


async def test_a_ninth_page_is_told_to_wait() -> None:
    async with ready_server() as server, contextlib.AsyncExitStack() as stack:
        pages = [await stack.enter_async_context(reading(server)) for _ in range(MAX_READERS)]
        assert {(await page.next())[0] for page in pages} == {"about"}
        response = await server.client.get(EVENTS)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert "close one" in response.json()["error"]["message"]


async def test_a_feed_ends_when_the_server_stops() -> None:
    async with ready_server() as server, reading(server) as events:
        await events.next()
        await events.next()
        server.server.should_exit = True
        name, said = "message", None
        while name == "message":
            name, said = await events.next()
        assert (name, said) == ("end", {"message": "the server is stopping"})
        await server.ended()


async def test_the_feed_says_that_the_model_loads() -> None:
    harness = Harness(loaded=False)
    response = await harness.client.get(EVENTS)
    assert response.status_code == 503
    assert "loading" in response.json()["error"]["message"]


async def test_head_of_the_feed_ends(harness: Harness) -> None:
    response = await harness.client.head(EVENTS)
    assert (response.status_code, response.content) == (200, b"")
    assert harness.engine.looks == []


async def test_the_page_needs_no_key_and_its_feed_does() -> None:
    harness = Harness(keys=KeyRing(["user"], ["root"]))
    for path in PATHS:
        assert (await harness.client.get(path)).status_code == 200
    assert (await harness.client.get(EVENTS)).status_code == 401
    assert (await harness.client.get(EVENTS, headers={"authorization": "Bearer wrong"})).status_code == 401
    for headers in (ROOT, USER):
        assert (await harness.client.head(EVENTS, headers=headers)).status_code == 200


async def test_a_key_sees_its_own_requests_and_an_admin_key_all() -> None:
    keys = {"api_key": ["user", "other"], "admin_api_key": ["root"]}
    async with ready_server(forever(TOKENIZER, "the "), **keys) as server:
        server.engine.gate.clear()
        body = {"prompt": "hi", "max_tokens": 99}
        ids = {"user": "of-user", "other": "of-other"}
        posts = [
            asyncio.create_task(
                server.client.post(
                    "/v1/completions",
                    json=body,
                    headers={"authorization": f"Bearer {key}", "x-request-id": request_id},
                )
            )
            for key, request_id in ids.items()
        ]
        while len(server.engine.live) < 2:
            await asyncio.sleep(0)
        seen = {}
        for key in ("user", "other", "root"):
            async with reading(server, {"authorization": f"Bearer {key}"}) as events:
                _, about = await events.next()
                _, snapshot = await events.next()
                seen[key] = sorted(request["rid"] for request in snapshot["requests"])
                assert about["is_admin"] == about["sees_all"] == (key == "root")
        assert seen == {"user": ["of-user"], "other": ["of-other"], "root": ["of-other", "of-user"]}
        # What is shown can be aborted by its id, and by nobody else.
        answer = await server.client.post("/abort", json={"rid": "of-other"}, headers=USER)
        assert answer.json() == {"aborted": 0}
        answer = await server.client.post("/abort", json={"rid": "of-other"}, headers=ROOT)
        assert answer.json() == {"aborted": 1}
        assert (await server.client.post("/abort_all", headers=USER)).status_code == 403
        server.engine.gate.set()
        await asyncio.gather(*posts)


@pytest.mark.parametrize("prefix", ["/llm", ""])
async def test_behind_a_prefix_that_a_proxy_strips_or_leaves(prefix: str) -> None:
    harness = Harness(root_path="/llm", keys=KeyRing(["user"]))
    for path in ("/", "/page/main.js"):
        assert (await harness.client.get(f"{BASE_URL}{prefix}{path}")).status_code == 200
    assert (await harness.client.get(f"{BASE_URL}{prefix}{EVENTS}")).status_code == 401


def test_the_page_is_no_part_of_the_api(harness: Harness) -> None:
    assert not [path for path in harness.app.openapi()["paths"] if path == "/" or path.startswith("/page")]
