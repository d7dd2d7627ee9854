"""Reasoning before an answer, between two tags or two sentences."""

from __future__ import annotations

from dataclasses import dataclass

from shortfin_apps.llm.serving.dialects.dialect import Calls, ThoughtMarks
from shortfin_apps.llm.serving.dialects.feed import Content, Feed, Parse
from shortfin_apps.llm.serving.dialects.lark import SPACE, Lark, one_of


@dataclass(frozen=True, slots=True)
class TaggedReasoning:
    """Reasoning between two tags: Qwen 3, DeepSeek-R1 and its distillations, SmolLM3, Mistral and others.

    Implements ReasoningDialect. The begin tag is at the start of the answer or at the end of the prompt.
    """

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
        if self._is_closed(prompt):
            return ""
        rest = f"{lark.thought(self.end)} {SPACE}"
        return rest if self.is_open(prompt) else f"({lark.literal(self.begin)} {rest})?"

    def thought_marks(self, prompt: str) -> ThoughtMarks | None:
        if self._is_closed(prompt):
            return None
        return ThoughtMarks(() if self.is_open(prompt) else (self.begin,), (self.end,))

    def _is_closed(self, prompt: str) -> bool:
        """Whether the chat template disables reasoning by an empty one at the end of the prompt."""
        return prompt.rstrip().endswith(self.end)


THINK = TaggedReasoning("<think>", "</think>")
MISTRAL_REASONING = TaggedReasoning("[THINK]", "[/THINK]")

THOUGHT_BEGINS = ("Here is my thought process:", "Here's my thought process:")
THOUGHT_ENDS = ("Here is my response:", "Here's my response:")


class GraniteReasoning:
    """Granite 3.2, which delimits reasoning by two sentences. Implements ReasoningDialect."""

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
        return f"({begin} {lark.thought(THOUGHT_ENDS[0])} {SPACE})?"

    def thought_marks(self, prompt: str) -> ThoughtMarks:
        return ThoughtMarks(THOUGHT_BEGINS, THOUGHT_ENDS)
