from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from shortfin_apps.llm.cli import main
from tests.scripted_server import DONE, Answer, ScriptedServer, event, says, streams, usage_event

CHAT = "/v1/chat/completions"
Type = Callable[..., None]
CTRL_C, CTRL_D = "\x03", "\x04"
PATIENCE_S = 30.0  # generous: it takes a second


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
def typed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Type]:
    """Types at a terminal: each turn with Enter, CTRL_C alone, and Ctrl-D at the end."""
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):

        def type_(*turns: str) -> None:
            keys.send_text("".join(turn if turn == CTRL_C else f"{turn}\r" for turn in turns) + CTRL_D)

        yield type_


def pasted(text: str) -> str:
    """The bytes that a terminal sends for pasted text."""
    return f"\x1b[200~{text}\x1b[201~"


def chat(server: ScriptedServer, *argv: str) -> int:
    return main(["chat", "--url", server.url, *argv])


def contents(server: ScriptedServer) -> list[list[str]]:
    return [[message["content"] for message in body["messages"]] for body in server.bodies(CHAT)]


def read_until(terminal: int, wanted: bytes) -> bytes:
    """Reads a program's output up to and including `wanted`."""
    seen = b""
    poll = select.poll()  # unlike `select`, it takes descriptors above 1023
    poll.register(terminal, select.POLLIN)
    while wanted not in seen:
        assert poll.poll(PATIENCE_S * 1000), f"no {wanted!r} in {PATIENCE_S} s, but {seen!r}"
        try:
            seen += os.read(terminal, 1)
        except OSError:  # the other end is closed
            raise AssertionError(f"it ended without {wanted!r}: {seen!r}") from None
    return seen


@pytest.fixture
def terminal(server: ScriptedServer) -> Iterator[int]:
    """The user's end of a terminal in which `chat` runs."""
    user_end, chat_end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    command = [sys.executable, "-m", "shortfin_apps.llm", "chat", "--url", server.url]
    process = subprocess.Popen(
        command,
        stdin=chat_end,
        stdout=chat_end,
        stderr=chat_end,
        env=environment,
        start_new_session=True,
    )
    os.close(chat_end)
    try:
        yield user_end
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        os.close(user_end)


def test_a_text_pasted_into_a_terminal_is_one_turn(server: ScriptedServer, terminal: int) -> None:
    read_until(terminal, b"\x1b[?2004h")  # it has enabled bracketed paste
    os.write(terminal, pasted("def f():\r  return 1\r\r/reset").encode() + b"\r")
    read_until(terminal, b"Hi!")
    read_until(terminal, b"\x1b[?2004h")
    os.write(terminal, b"And now?\r")
    read_until(terminal, b"Hi!")
    turn = "def f():\n  return 1\n\n/reset"
    assert contents(server) == [[turn], [turn, "Hi!", "And now?"]]


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


def test_a_terminal_is_greeted_and_ctrl_d_quits(
    server: ScriptedServer, typed: Type, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("Hello")
    assert chat(server) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"tiny at {server.url}; /help lists commands, Ctrl-D quits",
        "Hi!",
        "",
    ]


def test_a_missing_server_is_reported_before_the_first_turn(
    typed: Type, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("Hello")
    assert main(["chat", "--url", "http://127.0.0.1:1"]) == 2
    assert "shortfin-llm serve DIR" in capsys.readouterr().err


def test_commands_change_the_conversation(server: ScriptedServer, typed: Type) -> None:
    typed("one", "/reset", "two", "/system Be brief.", "three", "/system", "four", "/exit", "never")
    assert chat(server) == 0
    assert contents(server) == [["one"], ["two"], ["Be brief.", "three"], ["four"]]


def test_pasted_text_is_only_a_command_for_a_system_message(server: ScriptedServer, typed: Type) -> None:
    typed(pasted("/usr/bin\n/usr/lib"), pasted("/system Be brief.\nBe kind."), "Hello")
    assert chat(server) == 0
    assert contents(server) == [["/usr/bin\n/usr/lib"], ["Be brief.\nBe kind.", "Hello"]]


def test_text_typed_around_pasted_text_is_part_of_the_turn(server: ScriptedServer, typed: Type) -> None:
    typed("Explain: " + pasted("a\r\nb\n") + "please")
    assert chat(server) == 0
    assert contents(server) == [["Explain: a\nb\nplease"]]


def test_a_conversation_is_saved(
    server: ScriptedServer, typed: Type, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "chat.json"
    typed("Hello", f"/save {file}", "/save", f"/save {tmp_path}/no/chat.json")
    assert chat(server) == 0
    assert [m["content"] for m in json.loads(file.read_text())["messages"]] == ["Hello", "Hi!"]
    out = capsys.readouterr().out
    assert "needs a file name" in out
    assert "cannot write" in out


def test_help_and_unknown_commands(
    server: ScriptedServer, typed: Type, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("/help", "/dance")
    assert chat(server) == 0
    out = capsys.readouterr().out
    assert out.count("/save FILE") == 2
    assert "unknown command /dance" in out
    assert server.bodies(CHAT) == []


def test_a_terminal_continues_after_an_error(
    server: ScriptedServer, typed: Type, capsys: pytest.CaptureFixture[str]
) -> None:
    server.on(CHAT, says({"error": {"message": "too long"}}, 400), answers("Hi"))
    typed("a very long question", "Hello")
    assert chat(server, "--stats") == 0
    captured = capsys.readouterr()
    assert "error: too long\n" in captured.err
    assert "3 tokens in, 1 out" in captured.err
    assert contents(server)[1] == ["Hello"]


def test_ctrl_c_at_the_prompt_does_not_quit(
    server: ScriptedServer, typed: Type, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(CTRL_C, "Hello")
    assert chat(server) == 0
    assert "(Ctrl-D or /exit quits)" in capsys.readouterr().out
    assert contents(server) == [["Hello"]]


def test_ctrl_c_stops_an_answer_and_keeps_its_text(
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
