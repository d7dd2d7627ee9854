"""Dialects that write tool calls in JSON: Hermes, SmolLM2, Granite 3, Mistral and Llama 3."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shortfin_apps.llm.serving.dialects.dialect import Function
from shortfin_apps.llm.serving.dialects.feed import (
    Arguments,
    CallParse,
    CallStart,
    Content,
    Feed,
    Parse,
    Wait,
)
from shortfin_apps.llm.serving.dialects.json_calls import (
    CALL_BEGIN,
    NO_ARGUMENTS,
    MarkedCalls,
    arguments_of,
    call_of,
    call_rest,
    list_of_calls,
    more_of,
    needless_brackets,
    object_form,
    parse_calls,
)
from shortfin_apps.llm.serving.dialects.lark import ANY_TEXT, Lark, one_of, repeated

HERMES, HERMES_END, NEW_LINE = "<tool_call>", "</tool_call>", "\n"
GRANITE = "<|tool_call|>"
MISTRAL, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
PYTHON_TAG = "<|python_tag|>"
WHITE = r"/[ \n]*/"
_NAME = re.compile(r"\s*[\w.-]+\s*")


class Hermes(MarkedCalls):
    """Hermes, Qwen 2.5 and 3, SmolLM3, Granite 4: `<tool_call>{"name": "f", "arguments": {}}</tool_call>`.

    The parser also accepts a list of calls between the tags.
    """

    marks = frozenset({HERMES, HERMES_END})
    begins = (HERMES,)

    def parse_call(self, feed: Feed, functions: Sequence[Function], begin: str) -> CallParse:
        before = begin + (yield from more_of(feed, begin))
        if not (yield from parse_calls(feed, before, stops=[NEW_LINE + HERMES_END])):
            return False
        yield from more_of(feed, HERMES_END)
        return True

    def calls(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        return repeated(lark.rule(super().calls(lark, functions, most)), lark.literal("\n"), most)

    def rest(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        return f"{lark.literal(NEW_LINE)} {call_of(lark, functions)} {lark.literal(NEW_LINE + HERMES_END)}"


class SmolLM(Hermes):
    """SmolLM2: a list of calls between the tags. SmolLM3 uses the Hermes format."""

    def calls(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        return MarkedCalls.calls(self, lark, functions, most)

    def rest(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        return list_of_calls(lark, functions, most, HERMES_END)


class Granite(MarkedCalls):
    """Granite 3: `<|tool_call|>[{"name": "f", "arguments": {}}]`. Granite 4 uses the Hermes format."""

    begins = (GRANITE, HERMES)  # Granite 3.1 sometimes writes HERMES
    marks = frozenset(begins)


class Mistral(MarkedCalls):
    """`[TOOL_CALLS][{"name": "f", "arguments": {}}]`, or `[TOOL_CALLS]f[ARGS]{}` in newer tokenizers."""

    marks = frozenset({MISTRAL, ID, ARGUMENTS})
    begins = (MISTRAL,)
    id_chars = 9  # chat templates refuse other lengths

    def parse_call(self, feed: Feed, functions: Sequence[Function], begin: str) -> CallParse:
        before = begin + (yield from more_of(feed, begin))
        if (yield from feed.peek()) in ("[", "{", ""):
            return (yield from parse_calls(feed, before))
        return (yield from _named_call(feed, before))

    def calls(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        calls = lark.rule(super().calls(lark, functions, most))
        return repeated(calls, "", most) if lark.is_special(ARGUMENTS) else calls

    def rest(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        if not lark.is_special(ARGUMENTS):
            return super().rest(lark, functions, most)
        calls = [
            f"{lark.literal(function.name + ARGUMENTS)} {arguments_of(lark, function)}"
            for function in functions
        ]
        return lark.rule(one_of(calls))


def _named_call(feed: Feed, before: str) -> CallParse:
    feed.record(before)
    name, mark = yield from feed.text_before(ID, ARGUMENTS, MISTRAL, "{")
    if mark == ID:
        _, mark = yield from feed.text_before(ARGUMENTS, MISTRAL, "{")
    if mark == ARGUMENTS:
        yield from more_of(feed, ARGUMENTS)
    elif mark is not None:
        feed.unread(mark)
    if _NAME.fullmatch(name) and mark in (ARGUMENTS, "{"):  # current chat templates omit ARGUMENTS
        if mark == ARGUMENTS and (yield from _ends(feed)):
            feed.recorded()
            yield CallStart(name.strip())
            yield Arguments(NO_ARGUMENTS)
            return True
        if (form := (yield from object_form(feed))) is not None:
            feed.recorded()
            yield CallStart(name.strip())
            yield from feed.copy_as(Arguments, form)
            yield from needless_brackets(feed)
            return True
    yield Content(feed.recorded())
    return False


def _ends(feed: Feed) -> Wait[bool]:
    """Return True if the call ends here without arguments: at the next call or the answer's end."""
    if (yield from feed.accept(MISTRAL)):
        feed.unread(MISTRAL)
        return True
    return (yield from feed.peek()) == "" and not feed.is_cut


class Llama3:
    """Llama 3: `{"name": "f", "parameters": {}}`, optionally after `<|python_tag|>`; `;` separates calls.

    Implements ToolDialect. JSON that does not call a known function, or that follows text, is content.
    """

    marks = frozenset({PYTHON_TAG})
    begins: tuple[str, ...] = (PYTHON_TAG,)
    id_chars: int | None = None

    def parse(self, feed: Feed, functions: Sequence[Function]) -> Parse:
        yield Content((yield from feed.space()))
        begin = PYTHON_TAG if (yield from feed.accept(PYTHON_TAG)) else ""
        yield from self.parse_call(feed, functions, begin)

    def parse_call(self, feed: Feed, functions: Sequence[Function], begin: str) -> CallParse:
        """Yield calls; unlike in other dialects, `begin` may be empty, at the start of an answer."""
        names = {function.name for function in functions}
        before = begin + ((yield from more_of(feed, begin)) if begin else "")
        has_calls = False
        while (yield from feed.peek()) in ("{", "["):
            if not (yield from parse_calls(feed, before, names)):
                return has_calls
            before, has_calls = (yield from _separator(feed)), True
        yield Content(before)
        return has_calls

    def calls(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        return repeated(call_of(lark, functions, "parameters"), lark.literal("; "), most)

    def answer(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        """Return a Lark expression of any answer; one that starts with CALL_BEGIN must be a call.

        This separates calls from content, which may be JSON as well.
        """
        rest = call_rest(lark, functions, "parameters")
        call = lark.rule(f"{lark.literal(CALL_BEGIN)} {rest}")
        more = f"({lark.literal('; ')} {call})*"
        bare = f"{lark.through(CALL_BEGIN, WHITE)} {rest} {more}"
        tagged = f"{WHITE} {lark.literal(PYTHON_TAG)} {call} {more}"
        return one_of([bare, ANY_TEXT, *([tagged] if lark.is_special(PYTHON_TAG) else [])])


def _separator(feed: Feed) -> Wait[str]:
    """Read an optional semicolon with the white space around it; return the white space."""
    before = yield from feed.space()
    yield from feed.accept(";")
    return before + (yield from feed.space())
