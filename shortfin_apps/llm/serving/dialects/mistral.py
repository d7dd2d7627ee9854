"""Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {}}]`, or `[TOOL_CALLS]f[ARGS]{}` in newer tokenizers."""

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
    NO_ARGUMENTS,
    arguments_of,
    list_of_calls,
    more_of,
    needless_brackets,
    object_form,
    parse_calls,
    parse_marked,
)
from shortfin_apps.llm.serving.dialects.lark import Lark, one_of, repeated

BEGIN, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"\s*[\w.-]+\s*")


class Mistral:
    """Implements ToolDialect."""

    marks = frozenset({BEGIN, ID, ARGUMENTS})
    begins: tuple[str, ...] = (BEGIN,)
    id_chars = 9  # templates refuse other lengths

    def parse(self, feed: Feed, functions: Sequence[Function]) -> Parse:
        yield from parse_marked(self, feed, functions)

    def parse_call(self, feed: Feed, functions: Sequence[Function], begin: str) -> CallParse:
        before = begin + (yield from more_of(feed, begin))
        if (yield from feed.peek()) in ("[", "{", ""):
            return (yield from parse_calls(feed, before))
        return (yield from _named_call(feed, before))

    def calls(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        calls = lark.rule(f"{lark.literal(BEGIN)} {_rest(lark, functions, most)}")
        return repeated(calls, "", most) if lark.is_special(ARGUMENTS) else calls

    def answer(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        return lark.text_with([BEGIN], _rest(lark, functions, most))


def _rest(lark: Lark, functions: Sequence[Function], most: int) -> str:
    """Returns an expression of a call, or a list of calls, after its begin mark."""
    if lark.is_special(ARGUMENTS):
        calls = [
            f"{lark.literal(function.name + ARGUMENTS)} {arguments_of(lark, function)}"
            for function in functions
        ]
        return lark.rule(one_of(calls))
    return list_of_calls(lark, functions, most)


def _named_call(feed: Feed, before: str) -> CallParse:
    feed.record(before)
    name, mark = yield from feed.text_before(ID, ARGUMENTS, BEGIN, "{")
    if mark == ID:
        _, mark = yield from feed.text_before(ARGUMENTS, BEGIN, "{")
    if mark == ARGUMENTS:
        yield from more_of(feed, ARGUMENTS)
    elif mark is not None:
        feed.unread(mark)
    if _NAME.fullmatch(name) and mark in (ARGUMENTS, "{"):  # current templates omit the mark
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
    """Returns True if there are no arguments."""
    if (yield from feed.accept(BEGIN)):
        feed.unread(BEGIN)
        return True
    return (yield from feed.peek()) == "" and not feed.is_cut
