"""Granite 3: `<|tool_call|>[{"name": "f", "arguments": {}}]`. Granite 4 uses the Hermes format."""

from __future__ import annotations

from collections.abc import Sequence

from shortfin_apps.llm.serving.dialects.dialect import Function
from shortfin_apps.llm.serving.dialects.feed import Feed
from shortfin_apps.llm.serving.dialects.json_calls import call_of, more_of, parse_calls, parse_marked
from shortfin_apps.llm.serving.dialects.lark import Lark, repeated
from shortfin_apps.llm.serving.dialects.pieces import CallParse, Parse

BEGIN = "<|tool_call|>"
OTHER_BEGIN = "<tool_call>"  # Granite 3.1 sometimes writes this


class Granite:
    """Implements ToolDialect."""

    marks = frozenset({BEGIN, OTHER_BEGIN})
    begins: tuple[str, ...] = (BEGIN, OTHER_BEGIN)
    id_chars: int | None = None

    def parse(self, feed: Feed, functions: Sequence[Function]) -> Parse:
        yield from parse_marked(self, feed, functions)

    def parse_call(self, feed: Feed, functions: Sequence[Function], begin: str) -> CallParse:
        return (yield from parse_calls(feed, begin + (yield from more_of(feed, begin))))

    def calls(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        return f"{lark.literal(BEGIN)} {_rest(lark, functions, most)}"

    def answer(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        return lark.text_with([BEGIN, OTHER_BEGIN], _rest(lark, functions, most))


def _rest(lark: Lark, functions: Sequence[Function], most: int) -> str:
    """Returns an expression of calls after their begin mark."""
    calls = repeated(call_of(lark, functions), lark.literal(", "), most)
    return f"{lark.literal('[')} {calls} {lark.literal(']')}"
