"""Converts messages for strict chat templates: users and assistants alternate, one tool call per message.

Clients send consecutive messages of one role, or a user message right after a tool result: templates of
Mistral and Gemma raise for these. Clients also send back answers with several tool calls: templates of
Llama 3 and gpt-oss raise, or render only the first call. gpt-oss's template also raises for an answer with
reasoning, text and a tool call.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

USER, ASSISTANT, TOOL = "user", "assistant", "tool"
CALLS = "tool_calls"
SEPARATOR = "\n\n"
THOUGHT_NAMES = ("reasoning_content", "reasoning", "thinking")  # fields of reasoning in templates


def joined(messages: Sequence[Message], **changed: object) -> Message:
    """Return the first message with the contents of all messages, and with the fields in `changed`."""
    return {**messages[0], **changed, "content": _texts(messages, "content")}


def with_one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Split messages with several tool calls into one message per call, each before its result, if any."""
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
    """Join consecutive messages of the user, and of the assistant; return one or two versions.

    In the first version, a message with tool calls is not joined with the assistant's text before it, because
    Mistral's templates drop the text of such a message. In the second, returned if it differs, it is.
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
    """Join the contents and the reasoning of messages, of which only the last may have tool calls."""
    thoughts = {name: text for name in THOUGHT_NAMES if (text := _texts(turn, name))}
    return joined(turn, **({CALLS: turn[-1][CALLS]} if turn[-1].get(CALLS) else {}), **thoughts)


def with_text_in_thoughts(messages: Sequence[Message]) -> list[Message]:
    """Move the text of each message with reasoning and tool calls to the end of the reasoning."""
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
    """Join each user message right after a tool result with the tool result."""
    result: list[Message] = []
    for message in messages:
        follows = bool(result) and result[-1].get("role") == TOOL and message.get("role") == USER
        result.append(joined([result.pop(), message]) if follows else message)
    return result


def _apart(message: Message, results: Sequence[Message]) -> Iterator[Message]:
    """Yield one message per tool call of `message`, each followed by the results of the call.

    The first message keeps the text; results of no call come last. Of several calls with the same id, or
    without an id, each gets one result, in order, and the last call also the remaining results.
    """
    by_id: dict[str, deque[Message]] = {}  # by `str(id)`, because a client may send any type
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
    """Join the values of a field as strings, because a client may send any type."""
    return SEPARATOR.join(str(message[name]) for message in messages if message.get(name))
