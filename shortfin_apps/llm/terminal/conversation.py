"""Holds, saves and loads the turns of a conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shortfin_apps.llm.client import Message
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.lone_surrogates import encodable

MARKDOWN_SUFFIXES = (".md", ".markdown")


class Conversation:
    """A conversation: an optional system message, then turns. If loaded, it may end with a question."""

    def __init__(self, system: str | None = None) -> None:
        self.system = None if system is None else encodable(system)
        self._turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """The system message, if any, and all turns, as `messages` of a chat request."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self._turns]

    def asking(self, question: str) -> list[Message]:
        """Return the messages followed by a new question, which `answered` will add to the conversation."""
        return [*self.messages, {"role": "user", "content": question}]

    def asking_again(self) -> list[Message]:
        """Return the messages up to the last question. Raises InvalidRequestError without a question."""
        after = self._last_question() + 1
        return self.messages[: len(self.messages) - len(self._turns) + after]

    def answered(self, question: str, answer: str) -> None:
        self._turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def answered_again(self, answer: str) -> None:
        """Replace the answer to the last question."""
        del self._turns[self._last_question() + 1 :]
        self._turns.append({"role": "assistant", "content": answer})

    def undo(self) -> str:
        """Remove the last question and its answer; return the question.

        Raises InvalidRequestError without a question.
        """
        place = self._last_question()
        question = str(self._turns[place]["content"])
        del self._turns[place:]
        return question

    def _last_question(self) -> int:
        """Return the index in the turns of the last question. Raises InvalidRequestError if there is none."""
        for place in reversed(range(len(self._turns))):
            if self._turns[place]["role"] == "user":
                return place
        raise InvalidRequestError("nothing has been asked yet")

    def reset(self) -> None:
        """Remove the turns but not the system message."""
        self._turns.clear()

    def save(self, file: Path, overwrite: bool = False) -> None:
        """Write Markdown to a file with a Markdown suffix, else the JSON `{"messages": [...]}`.

        Raises InvalidRequestError if the file cannot be written, or if it exists and `overwrite` is False.
        """
        text = self._markdown() if file.suffix in MARKDOWN_SUFFIXES else self._json()
        try:
            with file.open("w" if overwrite else "x", encoding="utf-8") as output:
                output.write(text)
        except FileExistsError:
            raise InvalidRequestError(f"{file} exists; `/save! {file}` overwrites it", "file") from None
        except (OSError, ValueError) as error:  # ValueError: a null byte in the name
            reason = error.strerror if isinstance(error, OSError) else error
            raise InvalidRequestError(f"cannot write {file}: {reason}", "file") from error

    def _json(self) -> str:
        return json.dumps({"messages": self.messages}, ensure_ascii=False, indent=2) + "\n"

    def _markdown(self) -> str:
        return "\n".join(f"## {m['role'].capitalize()}\n\n{m['content']}\n" for m in self.messages)

    def load(self, file: Path) -> None:
        """Replace the conversation by the messages in a JSON file written by `save`.

        For any other file, the conversation is unchanged and InvalidRequestError is raised.
        """
        messages = _messages_of(file)
        self.system = str(messages.pop(0)["content"]) if messages[0]["role"] == "system" else None
        self._turns = messages


def _messages_of(file: Path) -> list[Message]:
    """Read the messages in a JSON file: at least one, of which only the first may be the system's.

    Raises InvalidRequestError.
    """
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequestError(f"cannot read {file}: {error.strerror}", "file") from error
    except (ValueError, RecursionError):
        raise InvalidRequestError(f"{file} is not JSON, as `/save` writes it", "file") from None
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError(f"{file} has no `messages`, as `/save` writes them", "file")
    return [_message(message, file, place) for place, message in enumerate(messages)]


def _message(message: Any, file: Path, place: int) -> Message:
    roles = ("system", "user", "assistant") if place == 0 else ("user", "assistant")
    if (
        not isinstance(message, dict)
        or message.keys() != {"role", "content"}
        or message["role"] not in roles
        or not isinstance(message["content"], str)
    ):
        raise InvalidRequestError(
            f"message {place + 1} of {file} is not the text of one of {', '.join(roles)}", "file"
        )
    return {"role": message["role"], "content": encodable(message["content"])}
