"""Llama 3: `{"name": "f", "parameters": {}}`, optionally after `<|python_tag|>`; `;` separates calls."""

from __future__ import annotations

from collections.abc import Sequence

from shortfin_apps.llm.serving.dialects.dialect import Function
from shortfin_apps.llm.serving.dialects.feed import CallParse, Content, Feed, Parse, Wait
from shortfin_apps.llm.serving.dialects.json_calls import (
    CALL_BEGIN,
    call_of,
    call_rest,
    more_of,
    parse_calls,
)
from shortfin_apps.llm.serving.dialects.lark import ANY_TEXT, Lark, one_of, repeated

PYTHON_TAG = "<|python_tag|>"
WHITE = r"/[ \n]*/"


class Llama3:
    """Implements ToolDialect. JSON that does not call a known function, or follows text, is content."""

    marks = frozenset({PYTHON_TAG})
    begins: tuple[str, ...] = (PYTHON_TAG,)
    id_chars: int | None = None

    def parse(self, feed: Feed, functions: Sequence[Function]) -> Parse:
        yield Content((yield from feed.space()))
        begin = PYTHON_TAG if (yield from feed.accept(PYTHON_TAG)) else ""
        yield from self.parse_call(feed, functions, begin)

    def parse_call(self, feed: Feed, functions: Sequence[Function], begin: str) -> CallParse:
        """Unlike other dialects, also parses calls without a begin mark, at the start of an answer."""
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
        """Calls and content may both be JSON: an answer that starts like a model's call must be a call."""
        rest = call_rest(lark, functions, "parameters")
        call = lark.rule(f"{lark.literal(CALL_BEGIN)} {rest}")
        more = f"({lark.literal('; ')} {call})*"
        bare = f"{lark.through(CALL_BEGIN, WHITE)} {rest} {more}"
        tagged = f"{WHITE} {lark.literal(PYTHON_TAG)} {call} {more}"
        return one_of([bare, ANY_TEXT, *([tagged] if lark.is_special(PYTHON_TAG) else [])])


def _separator(feed: Feed) -> Wait[str]:
    """Reads a semicolon, which is dropped, and returns the white space around it."""
    before = yield from feed.space()
    yield from feed.accept(";")
    return before + (yield from feed.space())
