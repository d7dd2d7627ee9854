from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.client import Sampling
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.terminal.commands import Commands, changed, is_command, shown, without_escape
from shortfin_apps.llm.terminal.conversation import Conversation


def test_parameters_are_set_and_left_to_the_server() -> None:
    sampling = changed({"seed": 7, "top_k": 3}, "temperature=1 min-p=0.5 top_k= seed=8 ignore_eos=true")
    assert sampling == {"seed": 8, "temperature": 1.0, "min_p": 0.5, "ignore_eos": True}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("stop=END", "END"),
        ("stop='two words'", "two words"),
        ("stop='\"\\n\"'", "\n"),
        ('stop=\'["a", "b"]\'', ["a", "b"]),
        ("cache_salt=12", "12"),
        ("stop=[", "["),
        ("logit_bias='{\"5\": -1}'", {"5": -1}),
        ("stop_token_ids=[1,2]", [1, 2]),
    ],
)
def test_values_are_json_or_text(text: str, value: object) -> None:
    assert list(changed({}, text).values()) == [value]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("temperature", "'temperature' has no value"),
        ("heat=1", "there is no parameter heat; there are max_tokens, "),
        ("temperature=warm", "temperature cannot be 'warm': Input should be a valid number"),
        ("temperature=true", "temperature cannot be"),
        ("temperature=NaN", "temperature cannot be"),
        ("max_tokens=1.5", "max_tokens cannot be '1.5'"),
        ("max_tokens=true", "max_tokens cannot be"),
        ("ignore_eos=1", "ignore_eos cannot be"),
        ("stop_token_ids='[\"a\"]'", "stop_token_ids cannot be"),
        ("stop='a", "open quotation"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_changes(text: str, reason: str) -> None:
    sampling: Sampling = {"seed": 7}
    with pytest.raises(InvalidRequestError, match=reason.replace("(", r"\(")):
        changed(sampling, f"seed=8 {text}")
    assert sampling == {"seed": 7}


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0, 2),
            "seed": st.integers(),
            "stop": st.lists(st.text(), max_size=3) | st.text(),
            "cache_salt": st.text(),
            "ignore_eos": st.booleans(),
        },
    )
)
def test_what_is_shown_sets_the_same(sampling: Sampling) -> None:
    assert changed({}, shown(sampling) if sampling else "") == sampling


Run = Callable[..., list[str]]


@pytest.fixture
def conversation() -> Conversation:
    conversation = Conversation("Be brief.")
    conversation.answered("Hello\nthere", "Hi")
    return conversation


@pytest.fixture
def run(conversation: Conversation) -> Run:
    """Runs commands, and returns what was said."""

    def run(*lines: str) -> list[str]:
        said: list[str] = []
        commands = Commands(conversation, {"seed": 7}, said.append, lambda: said.append("regenerated"))
        for line in lines:
            commands.run(line)
        return said

    return run


@pytest.mark.parametrize(
    ("turn", "is_one", "sent"),
    [
        ("/help", True, ""),
        ("hello", False, "hello"),
        ("//help", False, "/help"),
        ("///", False, "//"),
        ("/usr\n/bin", False, "/usr\n/bin"),
        ("/system a\nb", True, ""),
        ("a/b", False, "a/b"),
    ],
)
def test_a_line_with_one_slash_is_a_command(turn: str, is_one: bool, sent: str) -> None:
    assert is_command(turn) == is_one
    assert is_one or without_escape(turn) == sent


def test_an_unknown_command_is_named(run: Run) -> None:
    assert run("/usr/bin/x") == [
        "unknown command /usr/bin/x; /help lists the commands, and `//usr/bin/x` sends it as text"
    ]
    assert "unknown command /," in run("/")[0] or "unknown command /;" in run("/")[0]


def test_the_system_message_is_set_shown_and_dropped(run: Run, conversation: Conversation) -> None:
    assert run("/system", "/system Be kind.", "/system", "/system -") == [
        "(the system message is: Be brief.)",
        "(the system message is: Be kind.)",
        "(the system message is: Be kind.)",
        "(no system message)",
    ]
    assert [m["content"] for m in conversation.messages] == ["Hello\nthere", "Hi"]


@pytest.mark.parametrize("name", ["~nobody-of-this-name/x.json", "x\0y.json"])
def test_a_place_that_cannot_be_is_one_sentence(run: Run, name: str) -> None:
    assert run(f"/save {name}")[0].startswith("cannot write ")
    assert run(f"/load {name}")[0].startswith(("cannot read ", f"{name} is not JSON"))


def test_parameters_are_set_and_shown(run: Run) -> None:
    assert run("/params", "/params temperature=0.5", "/params seed=", "/params x=1")[:3] == [
        "seed=7",
        "seed=7 temperature=0.5",
        "temperature=0.5",
    ]


def test_a_question_is_undone_and_a_conversation_cleared(run: Run, conversation: Conversation) -> None:
    assert run("/undo", "/undo") == ["(forgotten: Hello)", "nothing has been asked yet"]
    conversation.answered("a", "b")
    assert run("/clear") == run("/reset") == ["(forgotten)"]
    assert len(conversation.messages) == 1


def test_a_file_is_not_overwritten_unasked(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "a chat.json"
    assert run(f"/save {file}", f"/save {file}", f"/save! {file}") == [
        f"(saved to {file})",
        f"{file} exists; `/save! {file}` overwrites it",
        f"(saved to {file})",
    ]
    assert len(json.loads(file.read_text())["messages"]) == 3


def test_a_saved_conversation_is_loaded(run: Run, conversation: Conversation, tmp_path: Path) -> None:
    before = conversation.messages
    assert run(f"/save {tmp_path}/c.json", "/clear", "/system -", f"/load {tmp_path}/c.json")[-1] == (
        "(3 messages loaded)"
    )
    assert conversation.messages == before


def test_files_need_names_and_others_take_none(run: Run) -> None:
    assert run("/save", "/load") == ["/save needs a file name", "/load needs a file name"]
    assert run("/undo 2", "/regen now") == [
        "the command has no arguments, but there is '2'",
        "the command has no arguments, but there is 'now'",
    ]
    assert run("/regen") == ["regenerated"]


@pytest.mark.parametrize("name", ["/quit", "/exit"])
def test_quit_ends(conversation: Conversation, name: str) -> None:
    commands = Commands(conversation, {}, print, lambda: None)
    commands.run(name)
    assert commands.done


def test_help_has_every_command(run: Run, conversation: Conversation) -> None:
    (said,) = run("/help")
    assert all(name in said for name in Commands(conversation, {}, print, lambda: None).names)
