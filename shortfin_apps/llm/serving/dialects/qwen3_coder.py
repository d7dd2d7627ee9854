"""Qwen3-Coder and Qwen3.5: tool calls in tags, with each argument's text in its own tags.

<tool_call>
<function=f>
<parameter=a>
text
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from shortfin_apps.llm.serving.dialects.argument_schemas import SchemaTypes, properties_of
from shortfin_apps.llm.serving.dialects.dialect import Function
from shortfin_apps.llm.serving.dialects.feed import (
    Arguments,
    CallParse,
    CallStart,
    Content,
    Feed,
    Parse,
    Piece,
    Wait,
)
from shortfin_apps.llm.serving.dialects.json_calls import MarkedCalls, more_of
from shortfin_apps.llm.serving.dialects.lark import ANY_TEXT, Lark, one_of, repeated
from shortfin_apps.llm.serving.dialects.tagged_values import json_value, value_expression, written_properties

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
TAGS = f"{BEGIN}\n{FUNCTION}"  # what precedes the function's name
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
BEGINS = (BEGIN, FUNCTION)
ENDS = (FUNCTION_END, END, *BEGINS)  # tags that end the arguments of a call
VALUE_ENDS = tuple(space + tag for tag in (PARAMETER_END, PARAMETER, *ENDS) for space in ("\n", ""))
EXACT_VALUE_ENDS = (f"\n{PARAMETER_END}\n",)  # under a grammar, where values may contain all other tags


class Qwen3Coder(MarkedCalls):
    """Implements ToolDialect. An argument's schema decides whether its text is a string or other JSON."""

    marks = frozenset({BEGIN, END})
    begins = BEGINS

    def parse_call(self, feed: Feed, functions: Sequence[Function], begin: str) -> CallParse:
        feed.record(begin)
        if begin == BEGIN:
            yield from more_of(feed, BEGIN)
            if not (yield from feed.accept(FUNCTION)):
                yield Content(feed.recorded())
                return False
        name, end = yield from feed.text_before(">", "\n", "<")
        if end == "<":
            feed.unread(end)
        is_named = end == ">" and bool(name.strip())
        stray, mark = (yield from _begin_of_call(feed)) if is_named else (None, None)
        text = feed.recorded()
        if stray is None:
            if mark is not None:
                feed.unread(mark)
            yield Content(text.removesuffix(mark or ""))
            return False
        parameters = next((each.parameters for each in functions if each.name == name.strip()), {})
        ends = EXACT_VALUE_ENDS if any(function.strict for function in functions) else VALUE_ENDS
        yield CallStart(name.strip())
        yield from _Arguments(feed, parameters, ends, stray).parse(mark)
        return True

    def calls(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        call = lark.rule(f"{lark.literal(TAGS)} {_rest(lark, functions)}")
        return repeated(call, lark.literal("\n"), most)

    def answer(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        rest = _rest(lark, functions)
        behind_tag = f"{lark.literal(TAGS.removeprefix(BEGIN))} {rest}"
        begun = one_of([f"{lark.through(BEGIN)} {behind_tag}", f"{lark.through(FUNCTION)} {rest}"])
        return f"{begun}* {ANY_TEXT}"


def _begin_of_call(feed: Feed) -> Wait[tuple[str | None, str | None]]:
    """Read up to the next tag after a function's name; return the text before the tag, and the tag.

    The text is None if this is not a call: if the tag begins another call, or if text precedes an end tag.
    The tag is None at the answer's end.
    """
    text, mark = yield from feed.text_before(PARAMETER, *ENDS)
    if mark == PARAMETER:
        return text, mark
    if mark in (FUNCTION_END, END) or (mark is None and not feed.is_cut):
        return (None, None) if text.strip() else (text, mark)
    return None, mark


class _Arguments:
    """Reads the arguments of a call. `stray`: text between the function's name and the first tag.

    Tags may be missing or doubled. Text between tags becomes content after the call.
    """

    def __init__(
        self, feed: Feed, parameters: Mapping[str, Any], value_ends: tuple[str, ...], stray: str
    ) -> None:
        self._feed = feed
        self._parameters = parameters
        self._properties = properties_of(parameters)
        self._types = SchemaTypes(parameters)
        self._value_ends = value_ends
        self._separator = ""
        self._stray = [stray]

    def parse(self, mark: str | None) -> Parse:
        """Yield the call's arguments as a JSON object. `mark`: the first tag, which has been read."""
        yield Arguments("{")
        while mark in (PARAMETER, PARAMETER_END):
            if mark == PARAMETER:
                mark = yield from self._parameter()
            else:
                text, mark = yield from self._feed.text_before(PARAMETER, PARAMETER_END, *ENDS)
                self._stray.append(text)
        if mark is None and self._feed.is_cut:
            return
        yield Arguments("}")
        yield Content("".join(self._stray).strip())
        if mark in BEGINS:
            self._feed.unread(mark)
        elif mark is not None:
            yield from _doubled_ends(self._feed)

    def _parameter(self) -> Generator[Piece | None, None, str | None]:
        """Yield an argument after its begin tag; read and return the tag that ends the argument."""
        key, end = yield from self._feed.text_before(">", "\n", "<")
        if end == "<":
            self._feed.unread(end)
        yield from self._feed.accept("\n")
        if end in ("<", None) or (yield from self._feed.accept(PARAMETER)):  # no value, or a doubled tag
            if end in (">", "\n"):
                self._feed.unread(PARAMETER)
            text, mark = yield from self._feed.text_before(PARAMETER, PARAMETER_END, *ENDS)
            self._stray.append(text)
            return mark
        yield Arguments(f"{self._separator}{json.dumps(key.strip(), ensure_ascii=False)}: ")
        self._separator = ", "
        types = self._types.of(self._properties.get(key.strip()))
        mark = yield from json_value(self._feed, types, self._value_ends)
        return None if mark is None else mark.strip()


def _doubled_ends(feed: Feed) -> Parse:
    """Read and drop further tags that end a call; yield the white space after them as content."""
    space = yield from feed.space()
    while (yield from feed.accept(FUNCTION_END, END, PARAMETER_END)):
        space = yield from feed.space()
    yield Content(space)


def _rest(lark: Lark, functions: Sequence[Function]) -> str:
    """Return a Lark expression of the part of a call after TAGS."""
    return lark.rule(one_of([_call_expression(lark, function) for function in functions]))


def _call_expression(lark: Lark, function: Function) -> str:
    types = SchemaTypes(function.parameters)
    parameters = [
        expression if is_required else f"({expression})?"
        for key, schema, is_required in written_properties(lark, function)
        for expression in [_parameter_expression(lark, function, key, schema, types)]
    ]
    begin = lark.literal(f"{function.name}>\n")
    return lark.rule(" ".join([begin, *parameters, lark.literal(f"{FUNCTION_END}\n{END}")]))


def _parameter_expression(
    lark: Lark, function: Function, key: str, schema: object, types: SchemaTypes
) -> str:
    begin = lark.literal(f"{PARAMETER}{key}>\n")
    return f"{begin} {value_expression(lark, function, schema, types, EXACT_VALUE_ENDS[0])}"
