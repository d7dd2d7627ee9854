"""A conversation's turns, and how it is written to a file."""

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
        """What the server is asked."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self._turns]

    def asking(self, question: str) -> list[Message]:
        """The messages with a question at their end, which stays out of the history until answered."""
        return [*self.messages, {"role": "user", "content": question}]

    def answered(self, question: str, answer: str) -> None:
        self._turns += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]

    def reset(self) -> None:
        """Forgets the turns; the system message stays."""
        self._turns.clear()

    def save(self, file: Path) -> None:
        """Writes `{"messages": [...]}`, the body of a chat request."""
        text = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=2)
        file.write_text(text + "\n", encoding="utf-8")
