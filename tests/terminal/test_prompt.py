from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from shortfin_apps.llm.lone_surrogates import encodable
from shortfin_apps.llm.terminal.prompt import Prompt, history_file, open_history


def test_the_file_is_in_the_state_directory(state_home: Path) -> None:
    assert history_file() == state_home / "shortfin-llm" / "chat_history"


def test_turns_are_kept_with_their_lines_and_for_their_owner_alone() -> None:
    said: list[str] = []
    open_history(history_file(), said.append).append_string("one\ntwo")
    history_file().chmod(0o644)
    again = open_history(history_file(), said.append)
    assert list(again.load_history_strings()) == ["one\ntwo"]
    assert (history_file().stat().st_mode & 0o777, history_file().parent.stat().st_mode & 0o777) == (
        0o600,
        0o700,
    )
    assert said == []


def test_another_users_file_is_neither_changed_nor_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    target.write_text("theirs")
    target.chmod(0o644)
    history_file().parent.mkdir(parents=True)
    history_file().symlink_to(target)
    monkeypatch.setattr(os, "getuid", lambda: target.stat().st_uid + 1)
    said: list[str] = []
    assert isinstance(open_history(history_file(), said.append), InMemoryHistory)
    assert "Operation not permitted" in said[0] or "not a file of this user" in said[0]
    assert (target.read_text(), target.stat().st_mode & 0o777) == ("theirs", 0o644)


def test_without_a_place_for_the_file_a_chat_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    assert isinstance(open_history(tmp_path / "file" / "history", said.append), InMemoryHistory)
    (sentence,) = said
    assert "cannot write" in sentence


def test_a_file_that_cannot_be_written_any_more_is_reported_once() -> None:
    said: list[str] = []
    history = open_history(history_file(), said.append)
    history_file().unlink()
    history_file().mkdir()
    history.append_string("one")
    history.append_string("two")
    assert history.get_strings() == ["one", "two"]
    assert len(said) == 1


@pytest.mark.parametrize(("text", "sent"), [("über 🙂", "über 🙂"), ("a\udcffb", "a\ufffdb")])
def test_bytes_that_are_not_utf_8_are_replaced(text: str, sent: str) -> None:
    assert encodable(text) == sent
    history = open_history(history_file(), print)
    history.append_string(text)
    assert list(open_history(history_file(), print).load_history_strings()) == [sent]


@pytest.fixture
def keys() -> Iterator[PipeInput]:
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        yield keys


@pytest.mark.parametrize("new_line", ["\x1b\r", "\n"])
def test_alt_enter_and_ctrl_j_start_a_new_line(keys: PipeInput, new_line: str) -> None:
    keys.send_text(f"one{new_line}two\r")
    assert Prompt(InMemoryHistory(), []).read() == "one\ntwo"


def test_up_recalls_a_turn_of_several_lines(keys: PipeInput) -> None:
    prompt = Prompt(InMemoryHistory(), [])
    keys.send_text("one\ntwo\r")
    prompt.read()
    keys.send_text("\x1b[A\r")
    assert prompt.read() == "one\ntwo"


def test_a_search_in_the_history_ends_with_enter_and_sends_with_another(keys: PipeInput) -> None:
    prompt = Prompt(InMemoryHistory(), [])
    for turn in ("the sky", "the sea"):
        keys.send_text(f"{turn}\r")
        prompt.read()
    keys.send_text("\x12sky\r!\r")
    assert "sky" in prompt.read()


def test_ctrl_d_ends_the_input_and_ctrl_c_interrupts(keys: PipeInput) -> None:
    prompt = Prompt(InMemoryHistory(), [])
    keys.send_text("\x04")
    with pytest.raises(EOFError):
        prompt.read()
    keys.send_text("abc\x03")
    with pytest.raises(KeyboardInterrupt):
        prompt.read()
