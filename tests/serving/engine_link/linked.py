"""API processes and the engine's in one event loop, with a real connection between them."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from shortfin_apps.llm.components.grammar.source import GrammarSource
from shortfin_apps.llm.components.recorder.dumps import Dumps
from shortfin_apps.llm.components.request.grammar import Grammar
from shortfin_apps.llm.serving.engine_link.api_link import ApiLink
from shortfin_apps.llm.serving.engine_link.api_links import ApiLinks
from shortfin_apps.llm.serving.engine_link.messages import Command
from shortfin_apps.llm.serving.engine_link.remote_engine import RemoteEngine, wait_for_engine
from shortfin_apps.llm.serving.frontend.async_engine import MAX_UNREAD_TOKENS, AsyncEngine
from tests.components.engine_fixture import Rig
from tests.serving.frontend.test_beam_search import PATIENCE_S

Execute = Callable[[Command], Sequence[float]]


class NoGrammars:
    async def compile_tried(self, source: GrammarSource, param: str, tenant: str) -> Grammar:
        raise NotImplementedError


def counts_nothing(command: Command) -> Sequence[float]:
    return []


@dataclass
class Linked:
    """`engine`, and what tests do to its links."""

    engine: AsyncEngine
    links: ApiLinks
    processes: list[tuple[RemoteEngine, ApiLink]] = field(default_factory=list)

    async def api_process(
        self,
        execute: Execute = counts_nothing,
        on_lost: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> tuple[RemoteEngine, ApiLink]:
        ours, theirs = socket.socketpair()
        link = await self.links.open(ours)
        welcome = await asyncio.to_thread(wait_for_engine, theirs)
        remote = RemoteEngine(theirs, welcome, execute=execute, on_lost=on_lost, clock=clock)
        remote.start()
        self.processes.append((remote, link))
        return remote, link

    async def close(self) -> None:
        self.links.close()
        for remote, link in self.processes:
            await remote.close()
            await link.lost.wait()
            while not remote._connection.is_lost:
                await asyncio.sleep(0)
        await self.engine.close()


@asynccontextmanager
async def linked(
    rig: Rig,
    max_requests: int = 64,
    max_unread_tokens: int = MAX_UNREAD_TOKENS,
    dumps: Dumps | None = None,
) -> AsyncIterator[Linked]:
    """Asserts at the end that all pages are free, whatever became of the API processes."""
    engine = AsyncEngine(
        rig.engine, max_requests=max_requests, max_unread_tokens=max_unread_tokens, dumps=dumps
    )
    engine.start()
    links = ApiLinks()
    await links.serve(engine, NoGrammars())
    each = Linked(engine, links)
    try:
        yield each
        await engine.drain(PATIENCE_S)
    finally:
        await each.close()
    rig.cache.check_integrity()
    assert rig.all_pages_back()
