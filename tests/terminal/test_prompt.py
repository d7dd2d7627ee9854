from __future__ import annotations

from collections.abc import Iterator

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from shortfin_apps.llm.terminal.prompt import Prompt


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
