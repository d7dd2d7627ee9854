from __future__ import annotations

import asyncio
import socket

import pytest

from shortfin_apps.llm.serving.engine_link.api_link import ApiLink
from shortfin_apps.llm.serving.engine_link.api_links import ApiLinks
from shortfin_apps.llm.serving.engine_link.connection import LENGTH
from shortfin_apps.llm.serving.engine_link.messages import Message, Prepared, Serving, encode
from shortfin_apps.llm.serving.frontend.async_engine import AsyncEngine
from tests.components.engine_fixture import make_rig
from tests.serving.engine_link.linked import NoGrammars

pytestmark = pytest.mark.timeout(20)


def send(sock: socket.socket, message: Message) -> None:
    text = encode(message)
    sock.sendall(LENGTH.pack(len(text)) + text)


async def test_a_process_that_is_prepared_while_others_are_waited_for_is_welcomed() -> None:
    engine, links = AsyncEngine(make_rig().engine, max_requests=4), ApiLinks()
    engine.start()
    slow, its_end = await opened(links)
    serving = asyncio.create_task(links.serve(engine, NoGrammars()))
    await asyncio.sleep(0)
    restarted, other_end = await opened(links)
    send(other_end, Prepared())
    await restarted.prepared.wait()
    assert not restarted.is_welcome
    send(its_end, Prepared())
    while not slow.is_welcome:
        await asyncio.sleep(0)
    assert restarted.is_welcome
    for end in (its_end, other_end):
        assert not serving.done()
        send(end, Serving())
    await serving
    links.close()
    for link, end in ((slow, its_end), (restarted, other_end)):
        end.close()
        await link.lost.wait()
    await engine.close()


async def opened(links: ApiLinks) -> tuple[ApiLink, socket.socket]:
    """A link, and the process's end of its connection."""
    ours, theirs = socket.socketpair()
    return await links.open(ours), theirs
