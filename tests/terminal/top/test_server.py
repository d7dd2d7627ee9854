from __future__ import annotations

import pytest
from starlette.responses import PlainTextResponse

from shortfin_apps.llm.client import LlmClient, ServerError
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.terminal.top.server import WatchedServer
from tests.scripted_server import ScriptedServer, says
from tests.terminal.top.metered import INFO, MeteredServer


async def test_figures_are_those_since_the_last_reading(server: ScriptedServer) -> None:
    metered = MeteredServer()
    first = metered.answer()
    metered.work(2.0)
    server.on("/metrics", first, metered.answer())
    server.on("/server_info", says(INFO))
    times = iter((10.0, 12.0))
    async with LlmClient(server.url, "key") as client:
        watched = WatchedServer(client, times.__next__)
        assert (await watched.read()).tokens_out_per_s is None
        assert (await watched.read()).tokens_out_per_s == 25
        assert watched.info == INFO
    assert {seen.headers["authorization"] for seen in server.seen} == {"Bearer key"}
    assert [seen.path for seen in server.seen] == ["/metrics", "/server_info", "/metrics"]


async def test_after_a_restart_it_begins_anew(server: ScriptedServer) -> None:
    old, new = MeteredServer(), MeteredServer()
    old.work(2.0)
    server.on("/metrics", old.answer(), new.answer())
    server.on("/server_info", says(INFO), says({**INFO, "version": "2"}))
    async with LlmClient(server.url) as client:
        watched = WatchedServer(client)
        await watched.read()
        assert (await watched.read()).tokens_out_per_s is None
        assert watched.info["version"] == "2"


async def test_another_server_needs_no_server_info(server: ScriptedServer) -> None:
    server.on("/metrics", lambda _, __: PlainTextResponse("vllm:num_requests_running 3\n"))
    async with LlmClient(server.url) as client:
        watched = WatchedServer(client)
        assert (await watched.read()).running == 3
        assert watched.info == {}


async def test_a_server_without_metrics_cannot_be_watched(server: ScriptedServer) -> None:
    async with LlmClient(server.url) as client:
        with pytest.raises(InvalidRequestError, match=r"has no /metrics to watch \(Not Found\)"):
            await WatchedServer(client).read()


async def test_other_texts_than_metrics_are_refused(server: ScriptedServer) -> None:
    server.on("/metrics", lambda _, __: PlainTextResponse("<html>"))
    async with LlmClient(server.url) as client:
        with pytest.raises(ServerError):
            await WatchedServer(client).read()
