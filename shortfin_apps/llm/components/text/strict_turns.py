"""Converts messages for strict chat templates: users and assistants alternate, one call per message.

Clients send several user messages in a row, or one right after the result of a call, and send back answers
with several calls, or with a thought, text and a call. Templates of Mistral and Gemma raise for the first
two; Llama 3 and gpt-oss templates raise for several calls, or show only the first; gpt-oss's raises for text
together with a thought and a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

Message = Mapping[str, Any]

USER, ASSISTANT, TOOL = "user", "assistant", "tool"
SEPARATOR = "\n\n"
THOUGHT_NAMES = ("reasoning_content", "reasoning", "thinking")  # used by chat templates; the last by gpt-oss


def joined(messages: Sequence[Message], **changed: str) -> Message:
    """Returns one message with the contents of all, and the other fields of the first."""
    texts = filter(None, (message.get("content") for message in messages))
    return {**messages[0], **changed, "content": SEPARATOR.join(texts)}


def with_one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Splits messages with several calls into several messages, each with its result."""
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
    """Joins user messages in a row."""
    result: list[Message] = []
    for role, group in groupby(messages, lambda message: message.get("role")):
        run = list(group)
        result += [joined(run)] if role == USER and len(run) > 1 else run
    return result


def with_text_in_thoughts(messages: Sequence[Message]) -> list[Message]:
    """Moves the text of messages that also have a thought and calls into the thought."""
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
    """Joins a user message right after the result of a call with that result."""
    result: list[Message] = []
    for message in messages:
        follows = bool(result) and result[-1].get("role") == TOOL and message.get("role") == USER
        result.append(joined([result.pop(), message]) if follows else message)
    return result


def _apart(message: Message, results: Sequence[Message]) -> Iterator[Message]:
    """Yields a message per call, before its results; text stays in the first, other results come last."""
    by_id: dict[object, list[Message]] = {}
    for each in results:
        by_id.setdefault(each.get("tool_call_id"), []).append(each)
    rest: Message = {"role": ASSISTANT, "content": ""}
    for place, call in enumerate(message["tool_calls"]):
        yield {**(rest if place else message), "tool_calls": [call]}
        yield from by_id.pop(call.get("id"), ())
    for others in by_id.values():
        yield from others
