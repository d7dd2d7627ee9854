"""Granite 3. Version 3.2 delimits thoughts by two sentences. A list of calls follows a mark.

    <|tool_call|>[{"name": "f", "arguments": {}}]

Granite 4 uses the Hermes format.
"""

from __future__ import annotations

from collections.abc import Sequence

from shortfin_apps.llm.serving.dialects.dialect import Calls, Function
from shortfin_apps.llm.serving.dialects.feed import CallParse, Content, Feed, Parse
from shortfin_apps.llm.serving.dialects.json_calls import list_of_calls, more_of, parse_calls, parse_marked
from shortfin_apps.llm.serving.dialects.lark import SPACE, Lark, one_of

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
        return f"{lark.literal(BEGIN)} {list_of_calls(lark, functions, most)}"

    def answer(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        return lark.text_with([BEGIN, OTHER_BEGIN], list_of_calls(lark, functions, most))


THOUGHT_BEGINS = ("Here is my thought process:", "Here's my thought process:")
THOUGHT_ENDS = ("Here is my response:", "Here's my response:")


class GraniteReasoning:
    """Implements ReasoningDialect."""

    marks: frozenset[str] = frozenset()
    content_begin = ""

    def is_open(self, prompt: str) -> bool:
        return False

    def parse_thought(self, feed: Feed, is_open: bool, calls: Calls) -> Parse:
        space = yield from feed.space()
        if (yield from feed.accept(*THOUGHT_BEGINS)):
            yield from calls.copy_thought(feed, *THOUGHT_ENDS)
        else:
            yield Content(space)

    def thought(self, lark: Lark, prompt: str) -> str:
        begin = one_of([lark.literal(text) for text in THOUGHT_BEGINS])
        return f"({begin} {lark.through(THOUGHT_ENDS[0])} {SPACE})?"
