"""gpt-oss: messages in channels. Reasoning is in the channel `analysis`; calls are messages to a function.

    <|channel|>analysis<|message|>text<|end|><|start|>assistant<|channel|>commentary to=functions.f
    <|constrain|>json<|message|>{"a": 1}<|call|>

Prompts end with `<|start|>assistant`, so the first header of an answer has no role. A header may name the
recipient (`to=`) after the role or after the channel.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence

from shortfin_apps.llm.serving.dialects.dialect import Calls, Function, ThoughtMarks
from shortfin_apps.llm.serving.dialects.feed import (
    Arguments,
    CallParse,
    CallStart,
    Content,
    Feed,
    Parse,
    Piece,
    Reasoning,
)
from shortfin_apps.llm.serving.dialects.json_calls import (
    EMPTY,
    NO_ARGUMENTS,
    arguments_of,
    needless_brackets,
    object_form,
)
from shortfin_apps.llm.serving.dialects.lark import ANY_TEXT, Lark, one_of
from shortfin_apps.llm.serving.dialects.mended_json import WHITE_SPACE

Kind = type[Content | Reasoning]
CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
HEADS = ("<|start|>", CHANNEL)  # marks that end a message and belong to the header of the next message
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
THOUGHT = "<|channel|>analysis<|message|>"
THOUGHT_END = "<|end|>"
PREAMBLE = f"<|channel|>commentary{MESSAGE}"
NEXT = "<|start|>assistant"
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")


class Harmony:
    """Implements ToolDialect and ReasoningDialect: one parser reads all channels, including calls."""

    marks = frozenset({CHANNEL, "<|constrain|>", MESSAGE, *ENDS})
    begins: tuple[str, ...] = ()
    id_chars: int | None = None
    content_begin = f"<|channel|>final{MESSAGE}"

    def parse(self, feed: Feed, functions: Sequence[Function]) -> Parse:
        kinds: set[Kind] = set()
        end: str | None = ""
        while end is not None:
            feed.record(end if end in HEADS else "")
            header, mark = yield from feed.text_before(MESSAGE, *ENDS)
            if mark == MESSAGE:
                end = yield from _message(feed, header, kinds)
                continue
            text, end = feed.recorded(), mark  # a header without message: no channels, or truncated
            if header.strip(WHITE_SPACE):
                yield Content(text.removesuffix(mark) if mark in HEADS else text)

    def parse_call(self, feed: Feed, functions: Sequence[Function], begin: str) -> CallParse:
        raise AssertionError("there are no begins")

    def calls(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        """Return a Lark expression of one call, whatever `most` is, because a call ends the answer."""
        calls = [
            lark.literal(f"<|channel|>commentary to=functions.{function.name} <|constrain|>json{MESSAGE}")
            + " "
            + arguments_of(lark, function)
            for function in functions
        ]
        return lark.rule(one_of(calls))

    def answer(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        """Return a Lark expression of a message to the user or a call, maybe after a preamble message."""
        before = f"({lark.literal(PREAMBLE)} {lark.through(THOUGHT_END)} {lark.literal(NEXT)})?"
        final = f"{lark.literal(self.content_begin)} {ANY_TEXT}"
        return f"{before} {one_of([final, self.calls(lark, functions, most)])}"

    def is_open(self, prompt: str) -> bool:
        return False

    def parse_thought(self, feed: Feed, is_open: bool, calls: Calls) -> Parse:
        """Yield the pieces of all channels, including content and calls; leaves no text unread."""
        yield from self.parse(feed, calls.functions)

    def thought(self, lark: Lark, prompt: str) -> str:
        return f"({lark.literal(THOUGHT)} {lark.thought(THOUGHT_END)} {lark.literal(NEXT)})?"

    def thought_marks(self, prompt: str) -> ThoughtMarks:
        return ThoughtMarks((THOUGHT,), (THOUGHT_END,))


def _message(feed: Feed, header: str, kinds: set[Kind]) -> Generator[Piece | None, None, str | None]:
    """Yield the pieces of a message after its `header`; return the message's end mark.

    `kinds`: kinds of the earlier messages, updated. Messages of one kind are separated by a line end.
    """
    while (yield from feed.accept(MESSAGE)):
        pass
    if (recipient := _RECIPIENT.search(header)) is not None:
        return (yield from _call(feed, recipient[1]))
    feed.recorded()
    channel = _CHANNEL.search(header)
    is_thought = channel is not None and channel[1] == "analysis"
    kind = Reasoning if is_thought else Content
    if kind in kinds:
        yield kind("\n")
    kinds.add(kind)
    return (yield from feed.copy(kind, *ENDS, CHANNEL))


def _call(feed: Feed, name: str) -> Generator[Piece | None, None, str | None]:
    """Yield a call of the function `name` after its header; return the message's end mark.

    Without valid arguments, yields the header and the message as content.
    """
    yield from feed.space()
    if (yield from feed.peek()) == "{" and (form := (yield from object_form(feed))) is not None:
        feed.recorded()
        yield CallStart(name)
        yield from feed.copy_as(Arguments, form)
        yield from needless_brackets(feed)
        return (yield from feed.copy(Content, *ENDS, CHANNEL))
    text, mark = yield from feed.text_before(*ENDS, CHANNEL)
    whole = feed.recorded()
    if text.strip(WHITE_SPACE) not in EMPTY or whole.endswith("{") or (mark is None and feed.is_cut):
        yield Content(whole)
    else:
        yield CallStart(name)
        yield Arguments(NO_ARGUMENTS)
    return mark
