from __future__ import annotations

import json

import pytest

from shortfin_apps.llm.cli import main
from tests.scripted_server import ScriptedServer, says
from tests.terminal.top.metered import INFO, MeteredServer

ONCE = ("--once", "--interval", "0.1")


@pytest.fixture
def server(server: ScriptedServer) -> ScriptedServer:
    metered = MeteredServer()
    first = metered.answer()
    metered.work(2.0)
    server.on("/metrics", first, metered.answer())
    server.on("/server_info", says(INFO))
    return server


def top(*argv: str) -> int:
    return main(["top", *argv])


def test_one_table_is_printed(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert top("--url", server.url, *ONCE) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"tiny at {server.url}, version 1.2")
    assert "3 running, 4 waiting, finished: 4 stop" in out
    assert "decode_bs4" in out


def test_the_figures_are_json_for_scripts(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert top("--url", server.url, "--api-key", "k", *ONCE, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["url"], figures["model"], figures["running"]) == (server.url, "tiny", 3)
    assert figures["pages"] == {"total": 100, "used": 50, "cached": 20, "free": 30}
    assert figures["tokens_out_per_s"] * figures["seconds"] == pytest.approx(50)
    assert [entry["entry"] for entry in figures["entries"]] == ["prefill_bs4", "decode_bs4"]
    assert {seen.headers["authorization"] for seen in server.seen} == {"Bearer k"}


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ((), "needs a terminal; --once prints one table"),
        (("--json",), "give --once, too"),
        (("--once", "--url", "http://127.0.0.1:1"), "no server answers"),
    ],
)
def test_what_cannot_be_is_said(
    argv: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert top(*argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert reason in captured.err


@pytest.mark.parametrize("interval", ["0", "-1", "0.05", "nan", "inf", "x"])
def test_an_interval_is_a_time(interval: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        top("--interval", interval)
