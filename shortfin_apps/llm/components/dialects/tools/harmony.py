"""gpt-oss: messages in channels. Thoughts are in `analysis`, and calls are messages to a function.

    <|channel|>analysis<|message|>text<|end|><|start|>assistant<|channel|>commentary to=functions.f
    <|constrain|>json<|message|>{"a": 1}<|call|>

Prompts end with `<|start|>assistant`, so an answer begins with a header of which the role is missing. A
recipient may be in the role or in the channel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from shortfin_apps.llm.components.dialects.dialect import Function
from shortfin_apps.llm.components.dialects.feed import Feed
from shortfin_apps.llm.components.dialects.json_calls import NO_ARGUMENTS, JsonValue, arguments_of
from shortfin_apps.llm.components.dialects.lark import ANY_TEXT, Lark, one_of
from shortfin_apps.llm.components.dialects.pieces import Arguments, CallStart, Content, Parse, Reasoning

MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
THOUGHT = "<|channel|>analysis<|message|>"
THOUGHT_END = "<|end|>"
PREAMBLE = f"<|channel|>commentary{MESSAGE}"
NEXT = "<|start|>assistant"
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")


class Harmony:
    """Implements ToolDialect and ReasoningDialect: one parser reads all channels, calls included."""

    marks = frozenset({"<|channel|>", "<|constrain|>", MESSAGE, *ENDS})
    id_chars: int | None = None
    content_begin = f"<|channel|>final{MESSAGE}"

    def parse(self, feed: Feed, functions: Sequence[Function]) -> Parse:
        kinds: set[Callable[[str], Content | Reasoning]] = set()
        while True:
            header, mark = yield from feed.text_before(MESSAGE)
            if mark is None:
                yield Content(header)  # of an answer without channels, or cut here
                return
            if (recipient := _RECIPIENT.search(header)) is not None:
                yield from _call(feed, recipient[1])
                continue
            channel = _CHANNEL.search(header)
            is_thought = channel is not None and channel[1] == "analysis"
            kind = Reasoning if is_thought else Content
            if kind in kinds:
                yield kind("\n")
            kinds.add(kind)
            yield from feed.copy(kind, *ENDS)

    def calls(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        """A message ends with its call, and so does the answer: one call."""
        calls = [
            lark.literal(f"<|channel|>commentary to=functions.{function.name} <|constrain|>json{MESSAGE}")
            + " "
            + arguments_of(lark, function)
            for function in functions
        ]
        return lark.rule(one_of(calls))

    def answer(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        """A message to the user or a call, behind a message on what comes or without."""
        before = f"({lark.literal(PREAMBLE)} {lark.through(THOUGHT_END)} {lark.literal(NEXT)})?"
        final = f"{lark.literal(self.content_begin)} {ANY_TEXT}"
        return f"{before} {one_of([final, self.calls(lark, functions, most)])}"

    def is_open(self, prompt: str) -> bool:
        return False

    def parse_thought(self, feed: Feed, is_open: bool) -> Parse:
        """All channels: nothing is left unread."""
        yield from self.parse(feed, ())

    def thought(self, lark: Lark, prompt: str) -> str:
        return f"({lark.literal(THOUGHT)} {lark.through(THOUGHT_END)} {lark.literal(NEXT)})?"


def _call(feed: Feed, name: str) -> Parse:
    yield CallStart(name)
    yield from feed.space()
    if (yield from feed.peek()) == "{":
        yield from feed.copy_span(Arguments, JsonValue())
        yield from feed.text_before(*ENDS)
        return
    text, _ = yield from feed.text_before(*ENDS)
    yield Arguments(text or NO_ARGUMENTS)
