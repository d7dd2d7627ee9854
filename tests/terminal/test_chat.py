from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from shortfin_apps.llm.cli import main
from shortfin_apps.llm.terminal.prompt import history_file
from tests.scripted_server import DONE, Answer, ScriptedServer, event, says, streams, usage_event
from tests.terminal.screen import PATIENCE_S, running

CHAT = "/v1/chat/completions"
Type = Callable[..., None]
CTRL_C, CTRL_D = "\x03", "\x04"


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


def test_a_chat_in_a_terminal(server: ScriptedServer) -> None:
    """Pasted lines are one turn, answers are rendered, and Ctrl-C stops one, keeping what came."""
    code = answers("Use `x`:\n\n```py\n", "x = 1\n", "```\n\n**Done**")
    server.on(CHAT, code, server.endless(delta("Once *upon*")), answers("Hi!"))
    with running("chat", "--url", server.url, "--temperature", "0.5", rows=30) as (terminal, process):
        terminal.wait("Ctrl-D quits\n>")
        terminal.type(pasted("def f():\r  return 1\r\r/reset") + "\r")
        screen = terminal.wait("prompt tokens cached\n>")
        assert "\nUse x:\n" in screen
        assert "\n x = 1\n" in screen
        assert "\nDone\n" in screen
        assert "\n3 tokens, " in screen
        terminal.type("And now?\r")
        terminal.wait("Once upon")
        terminal.type(CTRL_C)
        # Before it asks, the terminal itself makes a line feed of Enter, which begins a new line.
        terminal.wait(lambda text: "(stopped)" in text and text.rstrip().endswith("\n>"))
        terminal.type("Go on\r")
        terminal.wait(lambda text: text.count("tokens cached\n>") == 2)
        terminal.type("/hel\t")
        terminal.wait("> /help")
        terminal.type("\r")
        # Until it asks again, the terminal itself takes Ctrl-D.
        terminal.wait(lambda text: "//TEXT" in text and text.rstrip().endswith("\n>"))
        terminal.type(CTRL_D)
        assert process.wait(PATIENCE_S) == 0
    turn = "def f():\n  return 1\n\n/reset"
    assert contents(server)[0] == [turn]
    assert contents(server)[2][2:] == ["And now?", "Once *upon*", "Go on"]


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
    typed(
        "one", "/clear", "two", "/system Be brief.", "three", "/system -", "/undo", "four", "/quit", "never"
    )
    assert chat(server) == 0
    assert contents(server) == [
        ["one"],
        ["two"],
        ["Be brief.", "two", "Hi!", "three"],
        ["two", "Hi!", "four"],
    ]


def test_two_slashes_send_one(server: ScriptedServer, typed: Type) -> None:
    typed("//usr/bin")
    assert chat(server) == 0
    assert contents(server) == [["/usr/bin"]]


def test_the_last_question_is_asked_again_with_another_seed(server: ScriptedServer, typed: Type) -> None:
    server.on(CHAT, answers("One"), answers("Two"), answers("Three"), answers("Four"))
    typed("Hello", "/regen", "/regen", "And?")
    assert chat(server) == 0
    assert contents(server) == [["Hello"], ["Hello"], ["Hello"], ["Hello", "Three", "And?"]]
    seeds = [body.get("seed") for body in server.bodies(CHAT)]
    assert (seeds[0], seeds[3]) == (None, None)
    assert len({*seeds}) == 3


def test_seeds_of_answers_that_were_asked_again_can_be_repeated(server: ScriptedServer, typed: Type) -> None:
    typed("Hello", "/regen", "/regen", "And?", "/regen")
    assert chat(server, "--seed", "7") == 0
    assert [body["seed"] for body in server.bodies(CHAT)] == [7, 8, 9, 7, 8]


def test_a_random_seed_stays_random(server: ScriptedServer, typed: Type) -> None:
    typed("Hello", "/regen", "/regen")
    assert chat(server, "--seed", "-1") == 0
    first, *seeds = [body["seed"] for body in server.bodies(CHAT)]
    assert first == -1
    assert not {0, 1} & set(seeds)


def test_an_answer_stays_when_there_is_no_other(server: ScriptedServer, typed: Type) -> None:
    server.on(CHAT, answers("One"), says({"error": {"message": "gone"}}, 400), answers("Two"))
    typed("Hello", "/regen", "And?")
    assert chat(server) == 0
    assert contents(server)[2] == ["Hello", "One", "And?"]


def test_parameters_are_changed_between_answers(server: ScriptedServer, typed: Type) -> None:
    typed("one", "/params temperature=0.5 top_k=4", "two", "/params top_k=", "three")
    assert chat(server, "-t", "0") == 0
    settings = [(body["temperature"], body.get("top_k")) for body in server.bodies(CHAT)]
    assert settings == [(0, None), (0.5, 4), (0.5, None)]


@pytest.mark.parametrize(("options", "kept"), [((), True), (("--no-history",), False)])
def test_what_is_typed_is_kept_unless_unwanted(
    server: ScriptedServer, typed: Type, options: tuple[str, ...], kept: bool
) -> None:
    typed("Hello")
    assert chat(server, *options) == 0
    assert history_file().exists() == kept
    assert not kept or "+Hello\n" in history_file().read_text()


def test_pasted_text_is_only_a_command_for_a_system_message(server: ScriptedServer, typed: Type) -> None:
    typed(pasted("/usr/bin\n/usr/lib"), pasted("/system Be brief.\nBe kind."), "Hello")
    assert chat(server) == 0
    assert [messages[0] for messages in contents(server)] == ["/usr/bin\n/usr/lib", "Be brief.\nBe kind."]


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
    assert out.count("/save FILE") == 1
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
    assert "(Ctrl-D or /quit quits)" in capsys.readouterr().out
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
