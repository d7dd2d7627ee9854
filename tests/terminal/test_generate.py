from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shortfin_apps.llm.cli import main
from tests.scripted_server import ScriptedServer, completes, completion_event, event, says, streams


@pytest.fixture
def server(server: ScriptedServer) -> ScriptedServer:
    server.on("/v1/completions", completes([" Paris", "."]))
    return server


def test_only_the_continuation_goes_to_stdout(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "The capital", "--url", server.url]) == 0
    assert capsys.readouterr() == (" Paris.\n", "")


def test_statistics_go_to_stderr(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "The capital", "--url", server.url, "--stats"]) == 0
    captured = capsys.readouterr()
    assert captured.out == " Paris.\n"
    assert "3 tokens in, 2 out" in captured.err


def test_every_option_reaches_the_server(server: ScriptedServer) -> None:
    options = "-n 9 --min-tokens 2 -t 0.5 --top-p 0.9 --top-k 40 --min-p 0.1 --seed 7 --stop a --stop b"
    more = "--stop-token-id 1 --stop-token-id 2 --ignore-eos --cache-salt s --model tiny"
    assert main(["generate", "x", "--url", server.url, *options.split(), *more.split()]) == 0
    (body,) = server.bodies()
    assert body == {
        "prompt": "x",
        "model": "tiny",
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": 7,
        "stop": ["a", "b"],
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
        "cache_salt": "s",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_options_that_are_not_given_are_not_sent(server: ScriptedServer) -> None:
    main(["generate", "x", "--url", server.url])
    assert server.bodies()[0].keys() == {"prompt", "max_tokens", "stream", "stream_options"}


def test_a_request_that_fails_prints_nothing_on_stdout(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "x", "--url", f"{server.url}/nowhere"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")


@pytest.mark.parametrize("argv", [[], ["-"]])
def test_the_text_may_come_from_a_pipe(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped\n"))
    assert main(["generate", *argv, "--url", server.url]) == 0
    assert server.bodies()[0]["prompt"] == "piped\n"


def test_the_text_may_come_from_a_file(server: ScriptedServer, tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_text("Once über", encoding="utf-8")
    assert main(["generate", "--file", str(tmp_path / "story.txt"), "--url", server.url]) == 0
    assert server.bodies()[0]["prompt"] == "Once über"


def test_files_that_are_not_text_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert main(["generate", "--file", str(tmp_path / "binary")]) == 2
    assert "not UTF-8" in capsys.readouterr().err
    assert main(["generate", "--file", str(tmp_path / "nothing")]) == 2
    assert "cannot read" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_pipe_that_is_not_text_is_refused(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    assert main([command]) == 2
    assert "stdin is not UTF-8" in capsys.readouterr().err


def test_bytes_of_the_command_line_that_are_not_text_are_replaced(server: ScriptedServer) -> None:
    assert main(["generate", "a\udcffb", "--url", server.url]) == 0
    assert server.bodies()[0]["prompt"] == "a\ufffdb"


def test_an_empty_text_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["generate"]) == 2
    assert "there is no text to continue" in capsys.readouterr().err


def test_without_a_server_the_error_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--url", "http://127.0.0.1:1"]) == 2
    assert capsys.readouterr().err == (
        "error: no server answers at http://127.0.0.1:1; start one with `shortfin-llm serve DIR`\n"
    )


def test_a_servers_error_is_shown(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.on("/v1/completions", says({"error": {"message": "`top_p` must lie in (0, 1]"}}, 400))
    assert main(["generate", "x", "--url", server.url]) == 2
    assert capsys.readouterr().err == "error: `top_p` must lie in (0, 1]\n"


def test_text_before_a_failure_is_shown(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.on(
        "/v1/completions", streams(completion_event("The "), event({"error": {"message": "device lost"}}))
    )
    assert main(["generate", "x", "--url", server.url]) == 2
    captured = capsys.readouterr()
    assert captured.out == "The \n"
    assert "device lost" in captured.err


def test_a_closed_stdout_is_not_an_error(server: ScriptedServer) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "shortfin_apps.llm", "generate", "x", "--url", server.url]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
