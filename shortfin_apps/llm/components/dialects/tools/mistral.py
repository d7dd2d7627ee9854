"""Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {}}]`, or `[TOOL_CALLS]f[ARGS]{}` of newer tokenizers."""

from __future__ import annotations

from collections.abc import Sequence

from shortfin_apps.llm.components.dialects.dialect import Function
from shortfin_apps.llm.components.dialects.feed import Feed
from shortfin_apps.llm.components.dialects.json_calls import (
    NO_ARGUMENTS,
    JsonValue,
    arguments_of,
    call_of,
    parse_calls,
)
from shortfin_apps.llm.components.dialects.lark import Lark, one_of, repeated
from shortfin_apps.llm.components.dialects.pieces import Arguments, CallStart, Content, Parse

BEGIN, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class Mistral:
    """Implements ToolDialect."""

    marks = frozenset({BEGIN, ID, ARGUMENTS})
    id_chars = 9  # templates refuse others

    def parse(self, feed: Feed, functions: Sequence[Function]) -> Parse:
        while (yield from feed.copy(Content, BEGIN)) is not None:
            yield from feed.space()
            if (yield from feed.peek()) in ("[", "{", ""):
                yield from parse_calls(feed, BEGIN)
            else:
                yield from _named_call(feed)

    def calls(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        calls = lark.rule(f"{lark.literal(BEGIN)} {_rest(lark, functions, most)}")
        return repeated(calls, "", most) if lark.is_special(ARGUMENTS) else calls

    def answer(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        return lark.text_with([BEGIN], _rest(lark, functions, most))


def _rest(lark: Lark, functions: Sequence[Function], most: int) -> str:
    """A call behind its begin, or a list of calls."""
    if lark.is_special(ARGUMENTS):
        calls = [
            f"{lark.literal(function.name + ARGUMENTS)} {arguments_of(lark, function)}"
            for function in functions
        ]
        return lark.rule(one_of(calls))
    calls_in_list = repeated(call_of(lark, functions), lark.literal(", "), most)
    return f"{lark.literal('[')} {calls_in_list} {lark.literal(']')}"


def _named_call(feed: Feed) -> Parse:
    name, mark = yield from feed.text_before(ID, ARGUMENTS, BEGIN)
    if mark == ID:
        _, mark = yield from feed.text_before(ARGUMENTS)
    if mark != ARGUMENTS:
        yield Content(BEGIN + name + (mark or ""))
        return
    yield CallStart(name.strip())
    yield from feed.space()
    if (yield from feed.peek()) == "{":
        yield from feed.copy_span(Arguments, JsonValue())
    else:
        yield Arguments(NO_ARGUMENTS)
