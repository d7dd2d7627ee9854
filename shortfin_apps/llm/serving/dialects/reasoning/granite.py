"""Granite 3.2's thoughts, delimited by two sentences."""

from __future__ import annotations

from shortfin_apps.llm.serving.dialects.dialect import Calls
from shortfin_apps.llm.serving.dialects.feed import Feed
from shortfin_apps.llm.serving.dialects.lark import SPACE, Lark, one_of
from shortfin_apps.llm.serving.dialects.pieces import Content, Parse

BEGINS = ("Here is my thought process:", "Here's my thought process:")
ENDS = ("Here is my response:", "Here's my response:")


class GraniteReasoning:
    """Implements ReasoningDialect."""

    marks: frozenset[str] = frozenset()
    content_begin = ""

    def is_open(self, prompt: str) -> bool:
        return False

    def parse_thought(self, feed: Feed, is_open: bool, calls: Calls) -> Parse:
        space = yield from feed.space()
        if (yield from feed.accept(*BEGINS)):
            yield from calls.copy_thought(feed, *ENDS)
        else:
            yield Content(space)

    def thought(self, lark: Lark, prompt: str) -> str:
        begin = one_of([lark.literal(text) for text in BEGINS])
        return f"({begin} {lark.through(ENDS[0])} {SPACE})?"
