"""Thoughts between two tags: Qwen 3, DeepSeek-R1 and its distillations, SmolLM3, and others."""

from __future__ import annotations

from dataclasses import dataclass

from shortfin_apps.llm.serving.dialects.dialect import Calls
from shortfin_apps.llm.serving.dialects.feed import Content, Feed, Parse
from shortfin_apps.llm.serving.dialects.lark import SPACE, Lark


@dataclass(frozen=True, slots=True)
class TaggedReasoning:
    """Implements ReasoningDialect. A thought begins the answer, or the prompt has opened it."""

    begin: str
    end: str

    @property
    def content_begin(self) -> str:
        return ""

    @property
    def marks(self) -> frozenset[str]:
        return frozenset({self.begin, self.end})

    def is_open(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(self.begin)

    def parse_thought(self, feed: Feed, is_open: bool, calls: Calls) -> Parse:
        space = yield from feed.space()
        if (yield from feed.accept(self.begin)) or is_open:
            yield from calls.copy_thought(feed, self.end)
        else:
            yield Content(space)

    def thought(self, lark: Lark, prompt: str) -> str:
        if prompt.rstrip().endswith(self.end):  # the template wrote an empty thought to disable thinking
            return ""
        rest = f"{lark.through(self.end)} {SPACE}"
        return rest if self.is_open(prompt) else f"({lark.literal(self.begin)} {rest})?"


THINK = TaggedReasoning("<think>", "</think>")


MISTRAL_REASONING = TaggedReasoning("[THINK]", "[/THINK]")
