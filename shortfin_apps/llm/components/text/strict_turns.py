"""Messages as strict chat templates take them: users and assistants alternate, one call to a message.

Clients send several messages of a user in a row, or one right after the result of a call, and send an answer
with several calls back. Templates of Mistral and Gemma raise for the first two, of Llama 3 for the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

Message = Mapping[str, Any]

USER, ASSISTANT, TOOL = "user", "assistant", "tool"
SEPARATOR = "\n\n"


def joined(messages: Sequence[Message], **changed: str) -> Message:
    """One message with the contents of all, and the other fields of the first."""
    texts = filter(None, (message.get("content") for message in messages))
    return {**messages[0], **changed, "content": SEPARATOR.join(texts)}


def in_turns(messages: Sequence[Message]) -> list[Message]:
    """With a user's messages in a row as one, and one of several calls as several, each with its result."""
    result: list[Message] = []
    for role, group in groupby(messages, lambda message: message.get("role")):
        run = list(group)
        if role == TOOL and result and len(_calls_of(result[-1])) > 1:
            result += _apart(result.pop(), run)
        else:
            result += [joined(run)] if role == USER and len(run) > 1 else run
    return result


def in_results(messages: Sequence[Message]) -> list[Message]:
    """With a user's message right after the result of a call as a part of that result."""
    result: list[Message] = []
    for message in messages:
        follows = bool(result) and result[-1].get("role") == TOOL and message.get("role") == USER
        result.append(joined([result.pop(), message]) if follows else message)
    return result


def _apart(message: Message, results: Sequence[Message]) -> Iterator[Message]:
    """A message for each call, before the results of it; text is with the first, other results are last."""
    by_id: dict[object, list[Message]] = {}
    for each in results:
        by_id.setdefault(each.get("tool_call_id"), []).append(each)
    rest: Message = {"role": ASSISTANT, "content": ""}
    for place, call in enumerate(_calls_of(message)):
        yield {**(rest if place else message), "tool_calls": [call]}
        yield from by_id.pop(call.get("id"), ())
    for others in by_id.values():
        yield from others


def _calls_of(message: Message) -> Sequence[Mapping[str, Any]]:
    return message.get("tool_calls") or ()
