"""Messages as strict chat templates take them: users and assistants alternate, one call to a message.

Clients send several messages of a user or of the assistant in a row, or a user's right after the result of
a call, and send an answer with several calls, or with a thought, text and a call, back. Templates of Mistral
and Gemma raise for the first two; those of Llama 3 and gpt-oss raise for several calls, or show the first
alone; gpt-oss's raises for text beside a thought and a call.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

USER, ASSISTANT, TOOL = "user", "assistant", "tool"
CALLS = "tool_calls"
SEPARATOR = "\n\n"
THOUGHT_NAMES = ("reasoning_content", "reasoning", "thinking")  # in chat templates; the last is gpt-oss's


def joined(messages: Sequence[Message], **changed: object) -> Message:
    """One message with the contents of all, and the other fields of the first."""
    return {**messages[0], **changed, "content": _texts(messages, "content")}


def with_one_call_each(messages: Sequence[Message]) -> list[Message]:
    """With messages of several calls as several messages, each with its result, if there is one."""
    groups: list[list[Message]] = []
    for message in messages:
        if groups and message.get("role") == TOOL:
            groups[-1].append(message)
        else:
            groups.append([message])
    result: list[Message] = []
    for first, *results in groups:
        result += _apart(first, results) if has_several_calls(first) else [first, *results]
    return result


def has_several_calls(message: Message) -> bool:
    return len(message.get(CALLS) or ()) > 1


def turns_joined(messages: Sequence[Message]) -> list[list[Message]]:
    """With messages of a user in a row as one, and those of the assistant: before one with calls, or with it.

    The second only if it differs: templates of Mistral show no text beside calls.
    """
    before, with_calls = (_joined(_turns(messages, up_to_calls)) for up_to_calls in (False, True))
    return [before] if before == with_calls else [before, with_calls]


def _joined(turns: Iterator[list[Message]]) -> list[Message]:
    return [_as_one(turn) if len(turn) > 1 else turn[0] for turn in turns]


def _turns(messages: Sequence[Message], up_to_calls: bool) -> Iterator[list[Message]]:
    turn: list[Message] = []
    for message in messages:
        if turn and not (_go_on(turn[-1], message) and (up_to_calls or not message.get(CALLS))):
            yield turn
            turn = []
        turn.append(message)
    if turn:
        yield turn


def _go_on(before: Message, after: Message) -> bool:
    role = after.get("role")
    return role in (USER, ASSISTANT) and role == before.get("role") and not before.get(CALLS)


def _as_one(turn: Sequence[Message]) -> Message:
    """Also with the thoughts of all; calls are in the last, if there are any."""
    thoughts = {name: text for name in THOUGHT_NAMES if (text := _texts(turn, name))}
    return joined(turn, **({CALLS: turn[-1][CALLS]} if turn[-1].get(CALLS) else {}), **thoughts)


def with_text_in_thoughts(messages: Sequence[Message]) -> list[Message]:
    """With the text of a message that has a thought and calls, too, as a part of the thought."""
    return [_all_thought(message) for message in messages]


def _all_thought(message: Message) -> Message:
    thoughts = {name: message[name] for name in THOUGHT_NAMES if message.get(name)}
    text = message.get("content")
    if not (thoughts and text and message.get(CALLS)):
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
    """A message for each call, before its results; text is with the first, other results are last.

    Calls without ids, or with the same, have a result each, in their order, and the last of them the rest.
    """
    by_id: dict[str, deque[Message]] = {}  # a client may have made anything of an id: each as a text
    for each in results:
        by_id.setdefault(str(each.get("tool_call_id")), deque()).append(each)
    rest: Message = {"role": ASSISTANT, "content": ""}
    later = Counter(str(call.get("id")) for call in message[CALLS])
    for place, call in enumerate(message[CALLS]):
        yield {**(rest if place else message), CALLS: [call]}
        call_id = str(call.get("id"))
        later[call_id] -= 1
        if not later[call_id]:
            yield from by_id.pop(call_id, ())
        elif of_call := by_id.get(call_id):
            yield of_call.popleft()
    for others in by_id.values():
        yield from others


def _texts(messages: Sequence[Message], name: str) -> str:
    """Of a field that a client may have made anything of: each as a text."""
    return SEPARATOR.join(str(message[name]) for message in messages if message.get(name))
