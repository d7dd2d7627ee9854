from __future__ import annotations

import json
from pathlib import Path

import pytest

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.terminal.conversation import Conversation

QUESTION = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief."}


def test_a_question_is_added_to_the_history_when_answered() -> None:
    conversation = Conversation("Be brief.")
    assert conversation.asking("Hello") == [SYSTEM, QUESTION]
    assert conversation.messages == [SYSTEM]
    conversation.answered("Hello", "Hi")
    assert conversation.messages == [SYSTEM, QUESTION, ANSWER]


def test_a_reset_keeps_the_system_message() -> None:
    conversation = Conversation("Be brief.")
    conversation.answered("Hello", "Hi")
    conversation.reset()
    assert conversation.messages == [SYSTEM]


def test_the_saved_file_is_the_body_of_a_chat_request(tmp_path: Path) -> None:
    conversation = Conversation()
    conversation.answered("Hello", "Hi, Jürgen")
    conversation.save(tmp_path / "chat.json")
    text = (tmp_path / "chat.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"messages": conversation.messages}
    assert "Jürgen" in text


def test_a_file_that_ends_in_md_is_markdown(tmp_path: Path) -> None:
    conversation = Conversation("Be brief.")
    conversation.answered("Hello", "Hi")
    conversation.save(tmp_path / "chat.md")
    assert (tmp_path / "chat.md").read_text(encoding="utf-8") == (
        "## System\n\nBe brief.\n\n## User\n\nHello\n\n## Assistant\n\nHi\n"
    )


def test_lone_surrogates_of_a_file_and_of_the_command_line_can_be_sent_and_saved(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"messages": [{"role": "user", "content": "a\\ud800b"}]}')
    conversation = Conversation("a\udcffb")
    assert conversation.messages == [{"role": "system", "content": "a\ufffdb"}]
    conversation.load(tmp_path / "a")
    assert conversation.messages == [{"role": "user", "content": "a\ufffdb"}]
    conversation.save(tmp_path / "b.md")


def test_a_file_that_is_nested_too_deep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("[" * 100_000)
    with pytest.raises(InvalidRequestError, match="is not JSON"):
        Conversation().load(tmp_path / "a")


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    for system in (None, "Be brief."):
        conversation = Conversation(system)
        conversation.answered("Hello", "Hi")
        conversation.save(tmp_path / "chat.json", overwrite=True)
        other = Conversation("Another.")
        other.load(tmp_path / "chat.json")
        assert (other.system, other.messages) == (system, conversation.messages)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot read"),
        (b"## User", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[]", "has no `messages`"),
        (b'{"messages": []}', "has no `messages`"),
        (b'{"messages": [{"role": "tool", "content": "x"}]}', "message 1 of"),
        (b'{"messages": [{"role": "user", "content": [1]}]}', "message 1 of"),
        (b'{"messages": [{"role": [], "content": "x"}]}', "message 1 of"),
        (b'{"messages": [{"role": "user", "content": "x", "tool_calls": []}]}', "message 1 of"),
        (
            b'{"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]}',
            "message 2 of .* is not the text of one of user, assistant",
        ),
    ],
)
def test_another_file_is_refused_and_changes_nothing(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    if content is not None:
        (tmp_path / "chat.json").write_bytes(content)
    conversation = Conversation("Be brief.")
    conversation.answered("Hello", "Hi")
    with pytest.raises(InvalidRequestError, match=reason):
        conversation.load(tmp_path / "chat.json")
    assert conversation.messages == [SYSTEM, QUESTION, ANSWER]


def test_the_last_question_is_asked_again_and_answered_anew() -> None:
    conversation = Conversation("Be brief.")
    conversation.answered("One", "1")
    conversation.answered("Hello", "Hello!")
    assert conversation.asking_again()[-2:] == [{"role": "assistant", "content": "1"}, QUESTION]
    conversation.answered_again("Hi")
    assert conversation.messages[-2:] == [QUESTION, ANSWER]
    assert len(conversation.messages) == 5


def test_a_loaded_question_without_an_answer_can_be_asked(tmp_path: Path) -> None:
    (tmp_path / "chat.json").write_text(json.dumps({"messages": [SYSTEM, QUESTION]}))
    conversation = Conversation()
    conversation.load(tmp_path / "chat.json")
    assert conversation.asking_again() == [SYSTEM, QUESTION]
    conversation.answered_again("Hi")
    assert conversation.messages == [SYSTEM, QUESTION, ANSWER]


def test_nothing_is_asked_again_or_undone_without_a_question() -> None:
    with pytest.raises(InvalidRequestError, match="nothing has been asked yet"):
        Conversation("x").asking_again()
    with pytest.raises(InvalidRequestError, match="nothing has been asked yet"):
        Conversation().undo()


def test_undo_removes_a_question_and_its_answer() -> None:
    conversation = Conversation()
    conversation.answered("One", "1")
    conversation.answered("Hello", "Hi")
    assert conversation.undo() == "Hello"
    assert [m["content"] for m in conversation.messages] == ["One", "1"]


def test_lone_surrogates_of_a_loaded_file_are_replaced(tmp_path: Path) -> None:
    file, saved = tmp_path / "chat.json", tmp_path / "saved.json"
    file.write_text('{"messages": [{"role": "user", "content": "a\\ud83d"}]}', encoding="utf-8")
    conversation = Conversation()
    conversation.load(file)
    assert conversation.messages == [{"role": "user", "content": "a\ufffd"}]
    conversation.save(saved)
    assert json.loads(saved.read_text(encoding="utf-8")) == {"messages": conversation.messages}
