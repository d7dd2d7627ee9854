from __future__ import annotations

import builtins
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shortfin_apps.llm.cli import main
from tests.scripted_server import DONE, Answer, ScriptedServer, event, says, streams, usage_event

CHAT = "/v1/chat/completions"
Type = Callable[..., None]


def delta(text: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"delta": {"content": text}, "finish_reason": finish_reason}]})


def answers(*words: str) -> Answer:
    return streams(*map(delta, words), delta("", "stop"), usage_event(3, len(words)), DONE)


@pytest.fixture
def server(server: ScriptedServer) -> ScriptedServer:
    server.on("/v1/models", says({"data": [{"id": "tiny"}]}))
    server.on(CHAT, answers("Hi", "!"))
    return server


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Type:
    def pipe(*lines: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))

    return pipe


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Type:
    """Lines from a terminal; KeyboardInterrupt stands for Ctrl-C, the end for Ctrl-D."""

    def type_(*lines: str | type[KeyboardInterrupt]) -> None:
        waiting = iter(lines)

        def read(prompt: str) -> str:
            assert prompt == "> "
            line = next(waiting, EOFError)
            if isinstance(line, str):
                return line
            raise line

        terminal = io.StringIO()
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stdin", terminal)
        monkeypatch.setattr(builtins, "input", read)

    return type_


def chat(server: ScriptedServer, *argv: str) -> int:
    return main(["chat", "--url", server.url, *argv])


def contents(server: ScriptedServer) -> list[list[str]]:
    return [[message["content"] for message in body["messages"]] for body in server.bodies(CHAT)]


def test_a_pipe_is_answered_line_by_line(
    server: ScriptedServer, piped: Type, capsys: pytest.CaptureFixture[str]
) -> None:
    piped("Hello", "", "And now?")
    assert chat(server, "--system", "Be brief.", "-t", "0") == 0
    assert capsys.readouterr() == ("Hi!\nHi!\n", "")
    assert contents(server) == [["Be brief.", "Hello"], ["Be brief.", "Hello", "Hi!", "And now?"]]
    assert server.bodies(CHAT)[0]["temperature"] == 0


def test_a_pipe_ends_at_the_first_error(
    server: ScriptedServer, piped: Type, capsys: pytest.CaptureFixture[str]
) -> None:
    server.on(CHAT, says({"error": {"message": "too long"}}, 400))
    piped("Hello", "And now?")
    assert chat(server) == 2
    assert capsys.readouterr().err == "error: too long\n"
    assert len(contents(server)) == 1


def test_a_terminal_is_greeted_and_left_by_ctrl_d(
    server: ScriptedServer, typed: Type, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("Hello")
    assert chat(server) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"tiny at {server.url}; /help lists commands, Ctrl-D leaves",
        "Hi!",
        "",
    ]


def test_a_missing_server_is_told_before_anything_is_typed(
    typed: Type, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("Hello")
    assert main(["chat", "--url", "http://127.0.0.1:1"]) == 2
    assert "shortfin-llm serve DIR" in capsys.readouterr().err


def test_commands_change_the_conversation(server: ScriptedServer, typed: Type) -> None:
    typed("one", "/reset", "two", "/system Be brief.", "three", "/system", "four", "/exit", "never")
    assert chat(server) == 0
    assert contents(server) == [["one"], ["two"], ["Be brief.", "three"], ["four"]]


def test_a_conversation_is_saved(
    server: ScriptedServer, typed: Type, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "chat.json"
    typed("Hello", f"/save {file}", "/save", f"/save {tmp_path}/no/chat.json")
    assert chat(server) == 0
    assert [m["content"] for m in json.loads(file.read_text())["messages"]] == ["Hello", "Hi!"]
    out = capsys.readouterr().out
    assert "needs the name of a file" in out
    assert "cannot write" in out


def test_help_and_strange_commands(
    server: ScriptedServer, typed: Type, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("/help", "/dance")
    assert chat(server) == 0
    out = capsys.readouterr().out
    assert out.count("/save FILE") == 2
    assert "there is no /dance" in out
    assert server.bodies(CHAT) == []


def test_a_terminal_outlives_an_error(
    server: ScriptedServer, typed: Type, capsys: pytest.CaptureFixture[str]
) -> None:
    server.on(CHAT, says({"error": {"message": "too long"}}, 400), answers("Hi"))
    typed("a very long question", "Hello")
    assert chat(server, "--stats") == 0
    captured = capsys.readouterr()
    assert "error: too long\n" in captured.err
    assert "3 tokens in, 1 out" in captured.err
    assert contents(server)[1] == ["Hello"]


def test_ctrl_c_at_the_prompt_stays(
    server: ScriptedServer, typed: Type, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(KeyboardInterrupt, "Hello")
    assert chat(server) == 0
    assert "(Ctrl-D or /exit leaves)" in capsys.readouterr().out
    assert contents(server) == [["Hello"]]


def test_ctrl_c_stops_an_answer_and_keeps_what_came(
    server: ScriptedServer, typed: Type, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.on(CHAT, server.endless(delta("Once")), answers("Hi"))
    write = sys.stdout.write
    interrupted = threading.Event()

    def write_and_interrupt(text: str) -> int:
        if "Once" in text and not interrupted.is_set():
            interrupted.set()
            os.kill(os.getpid(), signal.SIGINT)
        return write(text)

    monkeypatch.setattr(sys.stdout, "write", write_and_interrupt)
    typed("Tell me", "Hello")
    assert chat(server) == 0
    assert server.disconnected.wait(10)
    assert "Once\n(stopped)\nHi\n" in capsys.readouterr().out
    assert contents(server)[1] == ["Tell me", "Once", "Hello"]
