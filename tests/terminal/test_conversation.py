from __future__ import annotations

import json
from pathlib import Path

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
