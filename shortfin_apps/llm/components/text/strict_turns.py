"""Messages as strict chat templates take them: users and assistants alternate, one call to a message.

Clients send several messages of a user in a row, or one right after the result of a call, and send an answer
with several calls, or with a thought, text and a call, back. Templates of Mistral and Gemma raise for the
first two; those of Llama 3 and gpt-oss raise for several calls, or show the first alone; gpt-oss's raises for
text beside a thought and a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

Message = Mapping[str, Any]

USER, ASSISTANT, TOOL = "user", "assistant", "tool"
SEPARATOR = "\n\n"
THOUGHT_NAMES = ("reasoning_content", "reasoning", "thinking")  # in chat templates; the last is gpt-oss's


def joined(messages: Sequence[Message], **changed: str) -> Message:
    """One message with the contents of all, and the other fields of the first."""
    texts = filter(None, (message.get("content") for message in messages))
    return {**messages[0], **changed, "content": SEPARATOR.join(texts)}


def with_one_call_each(messages: Sequence[Message]) -> list[Message]:
    """With messages of several calls as several messages, each with its result."""
    result: list[Message] = []
    for role, group in groupby(messages, lambda message: message.get("role")):
        run = list(group)
        if role == TOOL and result and has_several_calls(result[-1]):
            result += _apart(result.pop(), run)
        else:
            result += run
    return result


def has_several_calls(message: Message) -> bool:
    return len(message.get("tool_calls") or ()) > 1


def with_users_joined(messages: Sequence[Message]) -> list[Message]:
    """With a user's messages in a row as one."""
    result: list[Message] = []
    for role, group in groupby(messages, lambda message: message.get("role")):
        run = list(group)
        result += [joined(run)] if role == USER and len(run) > 1 else run
    return result


def with_text_in_thoughts(messages: Sequence[Message]) -> list[Message]:
    """With the text of a message that has a thought and calls, too, as a part of the thought."""
    return [_all_thought(message) for message in messages]


def _all_thought(message: Message) -> Message:
    thoughts = {name: message[name] for name in THOUGHT_NAMES if message.get(name)}
    text = message.get("content")
    if not (thoughts and text and message.get("tool_calls")):
        return message
    return {**message, "content": ""} | {
        name: f"{thought}{SEPARATOR}{text}" for name, thought in thoughts.items()
    }


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
    for place, call in enumerate(message["tool_calls"]):
        yield {**(rest if place else message), "tool_calls": [call]}
        yield from by_id.pop(call.get("id"), ())
    for others in by_id.values():
        yield from others
