"""Hermes, Qwen 2.5 and 3, SmolLM3, Granite 4: `<tool_call>{"name": "f", "arguments": {}}</tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence

from shortfin_apps.llm.serving.dialects.dialect import Function
from shortfin_apps.llm.serving.dialects.feed import CallParse, Feed, Parse
from shortfin_apps.llm.serving.dialects.json_calls import (
    call_of,
    list_of_calls,
    more_of,
    parse_calls,
    parse_marked,
)
from shortfin_apps.llm.serving.dialects.lark import Lark, repeated

BEGIN, END = "<tool_call>", "</tool_call>"
NEW_LINE = "\n"


class Hermes:
    """Implements ToolDialect. Also reads a list of calls between the tags."""

    marks = frozenset({BEGIN, END})
    begins: tuple[str, ...] = (BEGIN,)
    id_chars: int | None = None

    def parse(self, feed: Feed, functions: Sequence[Function]) -> Parse:
        yield from parse_marked(self, feed, functions)

    def parse_call(self, feed: Feed, functions: Sequence[Function], begin: str) -> CallParse:
        before = begin + (yield from more_of(feed, begin))
        if not (yield from parse_calls(feed, before, stops=[NEW_LINE + END])):
            return False
        yield from more_of(feed, END)
        return True

    def calls(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        call = lark.rule(f"{lark.literal(BEGIN)} {_rest(lark, functions)}")
        return repeated(call, lark.literal("\n"), most)

    def answer(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        return lark.text_with([BEGIN], _rest(lark, functions))


def _rest(lark: Lark, functions: Sequence[Function]) -> str:
    """Returns an expression of a call after its begin tag."""
    return f"{lark.literal(NEW_LINE)} {call_of(lark, functions)} {lark.literal(NEW_LINE + END)}"


class SmolLM(Hermes):
    """SmolLM2: a list of calls between the tags. SmolLM3 uses the Hermes format."""

    def calls(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        return f"{lark.literal(BEGIN)} {list_of_calls(lark, functions, most, END)}"

    def answer(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        return lark.text_with([BEGIN], list_of_calls(lark, functions, most, END))
