"""Adapts message roles to a chat template, which may drop roles that it does not know, or raise.

Clients send `developer` messages, several system messages, and system messages late in a conversation. Short
trial messages, rendered once and cached, show how the template handles each case:

- `developer` becomes `system`, unless the template renders it differently from an unknown role.
- Several or late system messages are kept if the template renders all of them in place.
- Otherwise the leading system messages are joined into one, and each late one is joined with the user message
  next to it: the text before it stays the same, so the cached pages are still used. If the template raises
  nevertheless, all system messages are joined into one.
- If the template has no system role, each system message is joined with the user message next to it.
- In a conversation without user messages, or one that ends with a tool result, system messages are kept only
  if the template renders them there.
- A message of another role that the template drops is refused. Dropped tool calls and results are logged.
- A message with several tool calls is split into one message per call, unless the template renders all calls.
- If the template raises, messages are converted to the form that strict templates accept (`strict_turns.py`).

Each kind of adaptation is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, cached_property
from itertools import groupby, takewhile

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.text.rendering import TemplateLimitError
from shortfin_apps.llm.serving.text.strict_turns import (
    ASSISTANT,
    TOOL,
    USER,
    Message,
    has_several_calls,
    in_results,
    joined,
    turns_joined,
    with_one_call_each,
    with_text_in_thoughts,
)

logger = logging.getLogger(__name__)

SYSTEM, DEVELOPER = "system", "developer"
UNKNOWN = "unknownrole"  # a role that no template knows
KNOWN = frozenset({SYSTEM, DEVELOPER, USER, ASSISTANT, TOOL})
MAX_OTHER_ROLES = 16  # per conversation; each needs a trial
_MARKS = ("trialone", "trialtwo", "trialthree", "trialfour")
_FILL = "hi"


class MessageRoles:
    """Adapts messages to one template. `render` renders messages or raises InvalidRequestError."""

    def __init__(self, render: Callable[[Sequence[Message]], str]) -> None:
        self._render = render
        self._logged: set[str] = set()
        self._shows, self._shows_alone = cache(self._try_first), cache(self._try_alone)
        self._shows_anywhere = cache(self._try_anywhere)
        self._shows_before_result = cache(self._try_before_result)

    def adapted(self, messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
        """Yield the adapted messages, then alternatives to render if the template raises.

        Raises InvalidRequestError for a role whose messages the template drops, and for too many roles.
        """
        roles = {str(message.get("role")) for message in messages}
        self._check(roles)
        if DEVELOPER in roles and not self._knows_developer:
            self._log("does not know the role `developer`: such messages become system messages")
            messages = [{**m, "role": SYSTEM} if m.get("role") == DEVELOPER else m for m in messages]
        if any(map(has_several_calls, messages)) and not self._shows_several_calls:
            self._log("takes one call in a message: each of several becomes a message, with its result")
            messages = with_one_call_each(messages)
        if self._fit(messages):
            yield from self._in_turns(messages)
        else:
            yield from self._in_turns(self._in_place(messages))
            messages = self._gathered(messages)
            yield from self._in_turns(messages)
        for turns in turns_joined(messages):
            if (within := in_results(turns)) != turns:
                self._log(
                    "refused a user message right after the result of a call: it becomes a part of that"
                )
                yield within if self._fit(within) else self._in_place(within)

    def _in_turns(self, messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
        """Yield the messages, then alternatives for strict templates."""
        yield messages
        for turns in turns_joined(messages):
            if turns != list(messages):
                self._log("refused messages of a user or of the assistant in a row: these become one")
                yield turns
        if (thoughts := with_text_in_thoughts(messages)) != list(messages):
            self._log("refused text with a thought and calls: it becomes a part of the thought")
            yield thoughts

    def _check(self, roles: set[str]) -> None:
        others = sorted(roles - KNOWN)
        if len(others) > MAX_OTHER_ROLES:
            raise InvalidRequestError(
                f"`messages` have {len(others)} roles that are not OpenAI's, but may have at most"
                f" {MAX_OTHER_ROLES}",
                "messages",
            )
        for role in others:
            if self._drops(role):
                raise InvalidRequestError(
                    f"this model's chat template drops messages of the role `{role[:40]}`; use `system`,"
                    " `user`, `assistant` or `tool`",
                    "messages",
                )
        if TOOL in roles:
            for dropped in self._dropped_of_calls:
                self._log(f"drops {dropped}: the model does not see them")

    def _fit(self, messages: Sequence[Message]) -> bool:
        """Return True if trials show that the template renders each system message in place."""
        found = [(place, message["role"]) for place, message in enumerate(messages) if _is_system(message)]
        if not found or not self._shows(USER):
            return True
        roles = {role for _, role in found}
        if [place for place, _ in found] != [0] and not all(map(self._shows_anywhere, roles)):
            return False
        return all(self._shows_system(role, messages) for role in roles)

    def _in_place(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Join the leading system messages into one, and each late one with the user messages next to it."""
        first = list(takewhile(_is_system, messages))
        others = _as_users(messages[len(first) :])
        if not first or not self._shows_system(first[0]["role"], others):
            self._log("has no system message there: it becomes a part of the user message next to it")
            return _as_users(messages)
        self._log("has one system message, the first: those after it become parts of it, or of user messages")
        return [joined(first), *others]

    def _gathered(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Join all system messages into one at the beginning."""
        self._log("refused messages with late system messages: these become one at the beginning")
        system = joined([message for message in messages if _is_system(message)])
        gathered = [system, *(message for message in messages if not _is_system(message))]
        return gathered if self._shows_system(system["role"], gathered) else _as_users(gathered)

    def _shows_system(self, role: str, messages: Sequence[Message]) -> bool:
        """Return True if the template renders a message of `role` at the start of `messages`."""
        if not any(message.get("role") == USER for message in messages):
            return self._shows_alone(role)
        return self._shows(role) and (messages[-1].get("role") != TOOL or self._shows_before_result(role))

    @cached_property
    def _knows_developer(self) -> bool:
        """True if the template renders `developer` messages differently from messages of an unknown role."""
        text, other = (self._tried(_first(role)) for role in (DEVELOPER, UNKNOWN))
        if text is None or _MARKS[0] not in text:
            return False
        return other is None or text.lower().replace(DEVELOPER, UNKNOWN) != other.lower()

    @cached_property
    def _dropped_of_calls(self) -> list[str]:
        """Which of tool calls and tool results the template drops, in words; empty if the template raises."""
        name, result = _MARKS[:2]
        if (text := self._tried([_message(USER), *_called((name, result))])) is None:
            return []
        parts = {"calls of tools in messages": name, "results of tools (messages of the role `tool`)": result}
        return [part for part, mark in parts.items() if mark not in text]

    @cached_property
    def _shows_several_calls(self) -> bool:
        """True if the template renders all tool calls of a message, or supports no tool calls at all."""
        one, other, *_ = _MARKS
        text = self._tried([_message(USER), *_called((one, _FILL), (other, _FILL))])
        if text is None:
            return self._tried([_message(USER), *_called((one, _FILL))]) is None
        return one not in text or other in text

    def _drops(self, role: str) -> bool:
        """Return True if the template drops messages of `role`: it neither renders them nor raises."""
        if self._shows(UNKNOWN):
            return False
        return all(self._is_lost(m) for m in (_first(role), [_message(USER), _message(role, _MARKS[0])]))

    def _is_lost(self, messages: Sequence[Message]) -> bool:
        text = self._tried(messages)
        return text is not None and _MARKS[0] not in text

    def _try_first(self, role: str) -> bool:
        """Return True if the template renders a first message of this role."""
        text = self._tried([_message(USER, _MARKS[0])] if role == USER else _first(role))
        return text is not None and _MARKS[0] in text

    def _try_alone(self, role: str) -> bool:
        text = self._tried([_message(role, _MARKS[0])])
        return text is not None and _MARKS[0] in text

    def _try_before_result(self, role: str) -> bool:
        """Return True if the template renders a first message of `role` before tool calls, or raises."""
        text = self._tried([*_first(role), *_called((_FILL, _FILL))])
        return text is None or _MARKS[0] in text

    def _try_anywhere(self, role: str) -> bool:
        one, two, three, four = (_message(role, mark) for mark in _MARKS)
        user, assistant = _message(USER), _message(ASSISTANT)
        text = self._tried([one, two, user, three, assistant, user, four]) or ""
        places = [text.find(mark) for mark in _MARKS]
        return -1 not in places and places == sorted(places)

    def _tried(self, messages: Sequence[Message]) -> str | None:
        try:
            return self._render(messages)
        except TemplateLimitError:  # not a result to cache: the machine may have been busy or suspended
            raise
        except InvalidRequestError:
            return None

    def _log(self, what: str) -> None:
        if what not in self._logged:
            self._logged.add(what)
            logger.warning("this model's chat template %s", what)


def _is_system(message: Message) -> bool:
    return message.get("role") in (SYSTEM, DEVELOPER)


def _as_users(messages: Iterable[Message]) -> list[Message]:
    """Join each system message and the user messages next to it into one user message."""
    result: list[Message] = []
    for _, group in groupby(messages, lambda message: _is_system(message) or message.get("role") == USER):
        run = list(group)
        result += [joined(run, role=USER)] if any(map(_is_system, run)) else run
    return result


def _message(role: str, text: str = _FILL) -> Message:
    return {"role": role, "content": text}


def _first(role: str) -> list[Message]:
    return [_message(role, _MARKS[0]), _message(USER)]


def _called(*named: tuple[str, str]) -> list[Message]:
    """Return a message with tool calls, and their results, for pairs of function name and result."""
    calls = [
        {"id": f"abcdefgh{place}", "type": "function", "function": {"name": name, "arguments": {}}}
        for place, (name, _) in enumerate(named)
    ]
    results = [
        {"role": TOOL, "tool_call_id": call["id"], "content": result}
        for call, (_, result) in zip(calls, named, strict=True)
    ]
    return [{"role": ASSISTANT, "content": "", "tool_calls": calls}, *results]
