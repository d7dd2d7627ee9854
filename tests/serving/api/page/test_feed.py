from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import orjson
import pytest

from shortfin_apps.llm.components.engine.snapshot import Snapshot
from shortfin_apps.llm.contract.errors import InvocationError, OverloadedError, UnavailableError
from shortfin_apps.llm.serving.api.page.feed import LONGEST_INTERVAL_S, MAX_READERS, MAX_SHARE, Feed
from shortfin_apps.llm.serving.api.page.viewer import Viewer
from tests.serving.api.harness import TOKENIZER
from tests.serving.api.scripted_engine import ScriptedEngine, saying

VIEWER = Viewer(tenant=None, is_admin=True)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(saying(TOKENIZER, "a"))


def feed_of(engine: ScriptedEngine, is_over: Callable[[], bool] = lambda: False) -> Feed:
    return Feed(engine.snapshot, is_over, interval_s=0.0)


async def at_of(reader_next: Awaitable[bytes | None]) -> float:
    data = await reader_next
    assert data is not None
    view: dict[str, Any] = orjson.loads(data)
    at: float = view["at"]
    return at


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_nobody_who_looks_asks_nothing(engine: ScriptedEngine) -> None:
    feed = feed_of(engine)
    await turns(50)
    assert engine.looks == []
    reader = feed.join(VIEWER)
    await reader.next()
    feed.leave(reader)
    await turns(5)
    looks = len(engine.looks)
    assert looks > 0
    await turns(50)
    assert len(engine.looks) == looks
    feed.leave(reader)


async def test_several_readers_share_their_looks(engine: ScriptedEngine) -> None:
    feed = feed_of(engine)
    readers = [feed.join(VIEWER) for _ in range(MAX_READERS)]
    ats = [await at_of(reader.next()) for reader in readers]
    assert len(engine.looks) < MAX_READERS * 3
    assert max(ats) <= len(engine.looks)
    for reader in readers:
        feed.leave(reader)
    assert feed.num_readers == 0


async def test_only_so_many_may_look(engine: ScriptedEngine) -> None:
    feed = feed_of(engine)
    readers = [feed.join(VIEWER) for _ in range(MAX_READERS)]
    with pytest.raises(OverloadedError) as caught:
        feed.join(VIEWER)
    assert caught.value.retry_after_s > 0
    feed.leave(readers[0])
    feed.leave(feed.join(VIEWER))
    for reader in readers:
        feed.leave(reader)


async def test_a_slow_reader_loses_snapshots_and_holds_nobody_up(engine: ScriptedEngine) -> None:
    feed = feed_of(engine)
    slow, quick = feed.join(VIEWER), feed.join(VIEWER)
    seen = [await at_of(quick.next()) for _ in range(20)]
    assert seen == sorted(seen)
    assert await at_of(slow.next()) >= seen[-1]
    feed.leave(slow)
    feed.leave(quick)


async def test_all_readers_are_told_when_the_server_stops(engine: ScriptedEngine) -> None:
    stops: list[bool] = []
    feed = feed_of(engine, lambda: bool(stops))
    readers = [feed.join(VIEWER) for _ in range(2)]
    for reader in readers:
        assert await reader.next() is not None
    stops.append(True)
    for reader in readers:
        while await reader.next() is not None:
            pass
        assert await reader.next() is None
    assert feed.num_readers == 0


@pytest.mark.parametrize("error", [UnavailableError("gone"), InvocationError("bug"), ZeroDivisionError()])
async def test_a_failed_look_ends_the_readers_and_not_the_feed(
    error: Exception, engine: ScriptedEngine
) -> None:
    failures = [error]

    async def take(after: int) -> Snapshot:
        if failures:
            raise failures.pop()
        return await engine.snapshot(after)

    feed = Feed(take, lambda: False, interval_s=0.0)
    reader = feed.join(VIEWER)
    with pytest.raises(type(error)):
        await reader.next()
    other = feed.join(VIEWER)
    assert await other.next() is not None
    feed.leave(other)


async def test_a_snapshot_that_takes_long_is_taken_less_often(engine: ScriptedEngine) -> None:
    feed = Feed(engine.snapshot, lambda: False, interval_s=0.25)
    snapshot = await engine.snapshot()
    assert feed._pause_s(snapshot) == 0.25
    assert feed._pause_s(replace(snapshot, taken_s=0.002)) == 0.002 / MAX_SHARE
    assert feed._pause_s(replace(snapshot, taken_s=1.0)) == LONGEST_INTERVAL_S
