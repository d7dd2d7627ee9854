"""gpt-oss: messages in channels. Thoughts are in `analysis`; calls are messages to a function.

    <|channel|>analysis<|message|>text<|end|><|start|>assistant<|channel|>commentary to=functions.f
    <|constrain|>json<|message|>{"a": 1}<|call|>

Prompts end with `<|start|>assistant`, so an answer begins with a header without its role. The recipient may
be in the role or in the channel.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence

from shortfin_apps.llm.serving.dialects.dialect import Calls, Function
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
HEADS = ("<|start|>", CHANNEL)  # ends of a message that belong to the next one's header
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
            text, end = feed.recorded(), mark  # of an answer without channels, or cut here
            if header.strip(WHITE_SPACE):
                yield Content(text.removesuffix(mark) if mark in HEADS else text)

    def parse_call(self, feed: Feed, functions: Sequence[Function], begin: str) -> CallParse:
        raise AssertionError("there are no begins")

    def calls(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        """Allows one call only: a call ends its message and the answer."""
        calls = [
            lark.literal(f"<|channel|>commentary to=functions.{function.name} <|constrain|>json{MESSAGE}")
            + " "
            + arguments_of(lark, function)
            for function in functions
        ]
        return lark.rule(one_of(calls))

    def answer(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        """A message to the user or a call, optionally after a preamble message."""
        before = f"({lark.literal(PREAMBLE)} {lark.through(THOUGHT_END)} {lark.literal(NEXT)})?"
        final = f"{lark.literal(self.content_begin)} {ANY_TEXT}"
        return f"{before} {one_of([final, self.calls(lark, functions, most)])}"

    def is_open(self, prompt: str) -> bool:
        return False

    def parse_thought(self, feed: Feed, is_open: bool, calls: Calls) -> Parse:
        """Reads all channels: no text is left unread."""
        yield from self.parse(feed, calls.functions)

    def thought(self, lark: Lark, prompt: str) -> str:
        return f"({lark.literal(THOUGHT)} {lark.through(THOUGHT_END)} {lark.literal(NEXT)})?"


def _message(feed: Feed, header: str, kinds: set[Kind]) -> Generator[Piece | None, None, str | None]:
    """Yields a message after its header; returns its end mark. `kinds` collects the kinds of all messages."""
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
    """Yields a call of `name` after its header, or content, header included, if it has no valid arguments."""
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
