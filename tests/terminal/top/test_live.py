from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from shortfin_apps.llm.client import AuthenticationError, LlmClient
from shortfin_apps.llm.terminal.top.figures import WatchedServer
from shortfin_apps.llm.terminal.top.live import LiveTable
from tests.components.stepped_engine import SteppedClock
from tests.scripted_server import ScriptedServer, says
from tests.terminal.screen import PATIENCE_S, running
from tests.terminal.top.metered import INFO, MeteredServer

AWAY = says({"error": {"message": "the model is loading"}}, 503)


@pytest.fixture
def metered(server: ScriptedServer) -> MeteredServer:
    metered = MeteredServer()
    server.on("/server_info", says(INFO))
    server.on("/metrics", metered.answer())
    return metered


@pytest.mark.timeout(60)
def test_the_table_in_a_terminal(server: ScriptedServer, metered: MeteredServer) -> None:
    """It shows figures, pauses, and ends."""
    first = metered.answer()
    metered.work(2.0)
    server.on("/metrics", first, metered.answer())
    with running("top", "--url", server.url, "--interval", "0.1") as (terminal, process):
        screen = terminal.wait("50 used, 20 cached, 30 free")
        assert f"tiny at {server.url}, version 1.2, cpu, default" in screen
        assert "3 running, 4 waiting" in screen
        assert terminal.lines[-1] == "every 0.1 s; p pauses and resumes, q quits"
        terminal.type("p")
        terminal.wait("paused; p pauses")
        terminal.type("p")
        terminal.wait("every 0.1 s; p")
        terminal.type("q")
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.timeout(60)
def test_it_follows_the_terminals_size_and_ctrl_c_ends_it(
    server: ScriptedServer, metered: MeteredServer
) -> None:
    with running("top", "--url", server.url, "--interval", "600") as (terminal, process):
        terminal.wait("requests")
        terminal.resize(30, 12)
        terminal.wait(lambda text: text.splitlines()[-1] == "every 600 s; p pauses and res…")
        terminal.type("\x03")
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.timeout(60)
def test_a_server_that_is_away_is_tried_again(server: ScriptedServer, metered: MeteredServer) -> None:
    server.on("/metrics", metered.answer(), AWAY, AWAY, metered.answer())
    with running("top", "--url", server.url, "--interval", "0.5") as (terminal, process):
        terminal.wait(lambda text: "tried again every 0.5 s" in text and "0 running" in text)
        terminal.wait(lambda text: "the model is loading" not in text and "0 running" in text)
        terminal.type("q")
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.timeout(60)
def test_a_wrong_key_ends_it_with_the_reason(server: ScriptedServer) -> None:
    server.on("/metrics", says({"error": {"message": "no such key"}}, 401))
    with running("top", "--url", server.url) as (terminal, process):
        terminal.wait("error: the server refuses access: no such key")
        assert process.wait(PATIENCE_S) == 2


async def test_how_long_a_server_is_away_is_shown_and_its_last_figures_stay(
    server: ScriptedServer, metered: MeteredServer
) -> None:
    server.on("/metrics", metered.answer(), AWAY)
    clock = SteppedClock()
    async with LlmClient(server.url, max_retries=0) as client:
        console = Console(file=StringIO(), width=80, height=24, color_system=None, _environ={})
        table = LiveTable(WatchedServer(client), console, 2.0, clock)
        await table.read()
        await table.read()
        clock.now_s = 5.0
        await table.read()
        clock.now_s = 12.0
        with console.capture() as capture:
            console.print(table._screen())
    shown = capture.get()
    assert "away for 12 s, tried again every 2 s: the model is loading" in shown
    assert "0 running, 0 waiting" in shown


async def test_nobody_at_the_address_is_no_reason_to_end() -> None:
    async with LlmClient("http://127.0.0.1:1", max_retries=0) as client:
        console = Console(file=StringIO(), width=80, height=24, _environ={})
        table = LiveTable(WatchedServer(client), console, 2.0)
        await table.read()
        with console.capture() as capture:
            console.print(table._screen())
    assert "no server answers at" in capture.get()


async def test_what_another_try_would_not_change_is_raised(server: ScriptedServer) -> None:
    server.on("/metrics", says({"error": {"message": "no"}}, 401))
    async with LlmClient(server.url) as client:
        with pytest.raises(AuthenticationError):
            await LiveTable(WatchedServer(client), Console(file=StringIO()), 2.0).read()
