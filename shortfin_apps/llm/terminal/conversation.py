"""The turns of a conversation, and saving them to a file."""

from __future__ import annotations

import json
from pathlib import Path

from shortfin_apps.llm.client import Message


class Conversation:
    """User and assistant turns, alternating, after an optional system message."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self._turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """The messages of a chat request."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self._turns]

    def asking(self, question: str) -> list[Message]:
        """The messages and a new question, which is not added to the history until it is answered."""
        return [*self.messages, {"role": "user", "content": question}]

    def answered(self, question: str, answer: str) -> None:
        self._turns += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]

    def reset(self) -> None:
        """Removes the turns but not the system message."""
        self._turns.clear()

    def save(self, file: Path) -> None:
        """Writes `{"messages": [...]}`, the body of a chat request."""
        text = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=2)
        file.write_text(text + "\n", encoding="utf-8")
