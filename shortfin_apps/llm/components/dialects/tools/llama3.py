"""Llama 3: `{"name": "f", "parameters": {}}`, maybe behind `<|python_tag|>`, and several with `;` between."""

from __future__ import annotations

from collections.abc import Sequence

from shortfin_apps.llm.components.dialects.dialect import Function
from shortfin_apps.llm.components.dialects.feed import Feed, Wait
from shortfin_apps.llm.components.dialects.json_calls import (
    CALL_BEGIN,
    call_of,
    call_rest,
    more_of,
    parse_calls,
)
from shortfin_apps.llm.components.dialects.lark import ANY_TEXT, Lark, one_of, repeated
from shortfin_apps.llm.components.dialects.pieces import CallParse, Content, Parse

PYTHON_TAG = "<|python_tag|>"
WHITE = r"/[ \n]*/"


class Llama3:
    """Implements ToolDialect. JSON that is no call of a known function, or follows text, is content."""

    marks = frozenset({PYTHON_TAG})
    begins: tuple[str, ...] = (PYTHON_TAG,)
    id_chars: int | None = None

    def parse(self, feed: Feed, functions: Sequence[Function]) -> Parse:
        yield Content((yield from feed.space()))
        begin = PYTHON_TAG if (yield from feed.accept(PYTHON_TAG)) else ""
        yield from self.parse_call(feed, functions, begin)

    def parse_call(self, feed: Feed, functions: Sequence[Function], begin: str) -> CallParse:
        """Unlike other models', also without a begin, at the beginning of an answer."""
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
        """A call is JSON, as content may be: what begins as models write one is held to it, at the start."""
        rest = call_rest(lark, functions, "parameters")
        call = lark.rule(f"{lark.literal(CALL_BEGIN)} {rest}")
        more = f"({lark.literal('; ')} {call})*"
        bare = f"{lark.through(CALL_BEGIN, WHITE)} {rest} {more}"
        tagged = f"{WHITE} {lark.literal(PYTHON_TAG)} {call} {more}"
        return one_of([bare, ANY_TEXT, *([tagged] if lark.is_special(PYTHON_TAG) else [])])


def _separator(feed: Feed) -> Wait[str]:
    """The white space around a semicolon, which is left out."""
    before = yield from feed.space()
    yield from feed.accept(";")
    return before + (yield from feed.space())
