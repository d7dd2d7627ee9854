"""GLM-4.5 to 4.7: tool calls in tags, with each argument's name and text in their own tags.

<tool_call>f
<arg_key>a</arg_key>
<arg_value>text</arg_value>
</tool_call>

GLM-4.7 writes no line ends.
"""

from __future__ import annotations

import json
import re
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
)
from shortfin_apps.llm.serving.dialects.json_calls import MarkedCalls, more_of
from shortfin_apps.llm.serving.dialects.lark import Lark, one_of, repeated
from shortfin_apps.llm.serving.dialects.tagged_values import json_value, value_expression, written_properties

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
NEXT = (KEY, END, BEGIN)  # tags that may follow an argument
VALUE_ENDS = (VALUE_END, *(space + tag for tag in NEXT for space in ("\n", "")))
EXACT_VALUE_ENDS = (VALUE_END,)  # under a grammar, where values may contain all other tags
LINE_END = r"/\n?/"
_NAME = re.compile(r"[\w.-]+")


class Glm(MarkedCalls):
    """Implements ToolDialect. An argument's schema decides whether its text is a string or other JSON."""

    marks = frozenset({BEGIN, END, KEY, KEY_END, VALUE, VALUE_END})
    begins = (BEGIN,)

    def parse_call(self, feed: Feed, functions: Sequence[Function], begin: str) -> CallParse:
        feed.record(begin)
        yield from more_of(feed, BEGIN)
        name, mark = yield from feed.text_before(*NEXT)
        is_ended = mark in (KEY, END) or (mark is None and not feed.is_cut)
        text, name = feed.recorded(), name.strip()
        if not is_ended or not _NAME.fullmatch(name):
            if mark is not None:
                feed.unread(mark)
            yield Content(text.removesuffix(mark or ""))
            return False
        parameters = next((each.parameters for each in functions if each.name == name), {})
        ends = EXACT_VALUE_ENDS if any(function.strict for function in functions) else VALUE_ENDS
        yield CallStart(name)
        yield from _Arguments(feed, parameters, ends).parse(mark)
        return True

    def calls(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        return repeated(lark.rule(super().calls(lark, functions, most)), LINE_END, most)

    def rest(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        return lark.rule(one_of([_call_expression(lark, function) for function in functions]))


class _Arguments:
    """Reads the arguments of a call. Tags may be missing or doubled.

    Text between tags becomes content after the call.
    """

    def __init__(self, feed: Feed, parameters: Mapping[str, Any], value_ends: Sequence[str]) -> None:
        self._feed = feed
        self._properties = properties_of(parameters)
        self._types = SchemaTypes(parameters)
        self._value_ends = value_ends
        self._separator = ""
        self._stray: list[str] = []

    def parse(self, mark: str | None) -> Parse:
        """Yield the call's arguments as a JSON object. `mark`: the tag after its name."""
        yield Arguments("{")
        while mark == KEY:
            mark = yield from self._argument()
        if mark is None and self._feed.is_cut:
            return
        yield Arguments("}")
        yield Content("".join(self._stray).strip())
        if mark == BEGIN:
            self._feed.unread(mark)
        elif mark is not None:
            yield Content((yield from more_of(self._feed, END)).replace(END, ""))

    def _argument(self) -> Generator[Piece | None, None, str | None]:
        """Yield an argument after the tag KEY; read and return the tag after the argument."""
        key, mark = yield from self._feed.text_before(KEY_END, VALUE, *NEXT)
        while mark == KEY_END:
            text, mark = yield from self._feed.text_before(KEY_END, VALUE, *NEXT)
            self._stray.append(text)
        if mark != VALUE:
            self._stray.append(key)
            return mark
        while (yield from self._feed.accept(VALUE)):
            pass  # a doubled tag
        yield Arguments(f"{self._separator}{json.dumps(key.strip(), ensure_ascii=False)}: ")
        self._separator = ", "
        types = self._types.of(self._properties.get(key.strip()))
        mark = yield from json_value(self._feed, types, self._value_ends)
        while mark == VALUE_END:
            text, mark = yield from self._feed.text_before(VALUE_END, *NEXT)
            self._stray.append(text)
        return None if mark is None else mark.strip()


def _call_expression(lark: Lark, function: Function) -> str:
    """Return a Lark expression of the part of a call after BEGIN."""
    types = SchemaTypes(function.parameters)
    parts = [lark.literal(function.name), LINE_END]
    for key, schema, is_required in written_properties(lark, function):
        names = f"{lark.literal(f'{KEY}{key}{KEY_END}')} {LINE_END} {lark.literal(VALUE)}"
        value = value_expression(lark, function, schema, types, VALUE_END)
        parts.append(f"({names} {value} {LINE_END}){'' if is_required else '?'}")
    return lark.rule(" ".join([*parts, lark.literal(END)]))
