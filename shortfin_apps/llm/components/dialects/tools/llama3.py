"""Llama 3: `{"name": "f", "parameters": {}}`, maybe behind `<|python_tag|>`, and several with `;` between."""

from __future__ import annotations

from collections.abc import Sequence

from shortfin_apps.llm.components.dialects.dialect import Function
from shortfin_apps.llm.components.dialects.feed import Feed, Wait
from shortfin_apps.llm.components.dialects.json_calls import call_of, parse_calls
from shortfin_apps.llm.components.dialects.lark import Lark, repeated
from shortfin_apps.llm.components.dialects.pieces import Content, Parse

PYTHON_TAG = "<|python_tag|>"


class Llama3:
    """Implements ToolDialect. JSON that is no call of a known function, or follows text, is content."""

    marks = frozenset({PYTHON_TAG})
    id_chars: int | None = None

    def parse(self, feed: Feed, functions: Sequence[Function]) -> Parse:
        names = {function.name for function in functions}
        yield Content((yield from feed.space()))
        yield from feed.accept(PYTHON_TAG)
        yield Content((yield from feed.space()))
        while (yield from feed.peek()) in ("{", "["):
            if not (yield from parse_calls(feed, names=names)):
                return
            yield Content((yield from _separator(feed)))

    def calls(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        return repeated(call_of(lark, functions, "parameters"), lark.literal("; "), most)


def _separator(feed: Feed) -> Wait[str]:
    """The white space around a semicolon, which is left out."""
    before = yield from feed.space()
    yield from feed.accept(";")
    return before + (yield from feed.space())
