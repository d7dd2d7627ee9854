"""Calls that are JSON objects: `{"name": "f", "arguments": {"a": 1}}`, alone or in a list.

`arguments` may be named `parameters`, come before the name, be a JSON string, or be missing. Valid JSON
arguments are passed on as the model writes them, white space included; invalid JSON is repaired
(`MendedJson`). An object is not a call if its arguments are not an object. It is not a call either if it has
no arguments but an object under another key, because a call without arguments would have another effect.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from shortfin_apps.llm.contract.errors import LlmError
from shortfin_apps.llm.lone_surrogates import encodable
from shortfin_apps.llm.serving.dialects.dialect import Function
from shortfin_apps.llm.serving.dialects.feed import (
    Arguments,
    CallParse,
    CallStart,
    Content,
    Feed,
    Parse,
    Wait,
)
from shortfin_apps.llm.serving.dialects.lark import Lark, one_of, repeated
from shortfin_apps.llm.serving.dialects.mended_json import (
    JsonValue,
    MendedJson,
    begins_member,
    mended,
)

CALL_BEGIN = '{"name": '
ARGUMENT_KEYS = ("arguments", "parameters")
NO_ARGUMENTS = "{}"
EMPTY = ("", "null", "None", "[]")  # texts that mean a call without arguments
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_COMBINING = {"allOf", "anyOf", "oneOf", "$ref", "patternProperties"}  # keywords that may add properties


class NotACallError(LlmError):
    """The text is not a call. Raised and caught within this module, where the text becomes content."""


class MarkedCalls:
    """Base class of ToolDialects that write calls inside content, after one of the marks `begins`.

    By default, one JSON list of calls follows the mark.
    """

    marks: frozenset[str]
    begins: tuple[str, ...]
    id_chars: int | None = None

    def parse(self, feed: Feed, functions: Sequence[Function]) -> Parse:
        while (begin := (yield from feed.copy(Content, *self.begins))) is not None:
            yield from self.parse_call(feed, functions, begin)

    def parse_call(self, feed: Feed, functions: Sequence[Function], begin: str) -> CallParse:
        return (yield from parse_calls(feed, begin + (yield from more_of(feed, begin))))

    def calls(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        return f"{lark.literal(self.begins[0])} {self.rest(lark, functions, most)}"

    def answer(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        return lark.text_with(self.begins, self.rest(lark, functions, most))

    def rest(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        """Return a Lark expression of the calls after their begin mark."""
        return list_of_calls(lark, functions, most)


def parse_calls(
    feed: Feed, before: str = "", names: Collection[str] | None = None, stops: Collection[str] = ()
) -> CallParse:
    """Yield the call or list of calls that comes next; return True if there was a call.

    Without a call, yields `before` and the text read as content. `names`: for formats in which content may be
    JSON as well: only JSON with one of these names and with arguments is a call. `stops`: texts, beginning
    with a line end, that end a string without closing quote in the arguments.
    """
    feed.record(before)
    has_calls = False
    try:
        yield from feed.space()
        if (yield from feed.accept("[")):
            while not (has_calls and (yield from _accept(feed, "]"))):
                yield from _CallReader(feed, names, stops).read()
                has_calls = True
                yield from _accept(feed, ",")
                feed.record()
        else:
            yield from _CallReader(feed, names, stops).read()
    except NotACallError:
        yield Content(feed.recorded())
        return has_calls
    feed.recorded()
    yield from needless_brackets(feed)
    return True


def needless_brackets(feed: Feed) -> Parse:
    """Read and drop closing brackets without opening ones; yield the white space after them as content."""
    space = yield from feed.space()
    while (yield from feed.accept("}", "]")):
        space = yield from feed.space()
    yield Content(space)


def more_of(feed: Feed, mark: str) -> Wait[str]:
    """Read white space and repetitions of `mark`; return the text read."""
    pieces = []
    while True:
        pieces.append((yield from feed.space()))
        if not (yield from feed.accept(mark)):
            return "".join(pieces)
        pieces.append(mark)


def object_form(feed: Feed) -> Wait[MendedJson | None]:
    """Read `{` and white space; return the converter of the object's rest, or None if no object begins."""
    if not (yield from feed.accept("{")):
        return None
    space = yield from feed.space()
    return MendedJson("{", space) if begins_member((yield from feed.peek())) else None


class _CallReader:
    """Reads one JSON object that may be a call. Drops the feed's record once it is known to be a call."""

    def __init__(self, feed: Feed, names: Collection[str] | None, stops: Collection[str]) -> None:
        self._feed = feed
        self._names = names
        self._stops = stops
        self._name: str | None = None
        self._early: str | None = None  # arguments that came before the name
        self._has_arguments = False
        self._has_other_object = False

    def read(self) -> Parse:
        yield from _expect(self._feed, "{")
        while not (yield from _accept(self._feed, "}")):
            if self._has_arguments:
                yield from self._rest()
                return
            yield from self._member((yield from self._key()))
            yield from _accept(self._feed, ",")
        if self._has_arguments:
            return
        if self._name is None or self._names is not None or self._has_other_object:
            raise NotACallError("no name, or no arguments")
        yield from self._begin(self._name)
        yield Arguments(NO_ARGUMENTS)

    def _rest(self) -> Parse:
        """Read and drop the object's members after its arguments; yield malformed text as content."""
        self._feed.record()
        try:
            while not (yield from _accept(self._feed, "}")):
                yield from self._key()
                value = JsonValue()
                yield from self._feed.read_span(value)
                if value.is_open:
                    raise NotACallError("the value has no end")
                yield from _accept(self._feed, ",")
                self._feed.record()
            self._feed.recorded()
        except NotACallError:
            yield Content(self._feed.recorded())

    def _key(self) -> Wait[str]:
        yield from self._feed.space()
        if (yield from self._feed.peek()) != '"':
            raise NotACallError("no key")
        key = yield from _string(self._feed)
        yield from _expect(self._feed, ":")
        yield from self._feed.space()
        return key

    def _member(self, key: str) -> Parse:
        if key == "name" and self._name is None:
            self._name = yield from _string(self._feed)
            if self._names is not None and self._name not in self._names:
                raise NotACallError("no function has this name")
            if self._early is not None:
                arguments = plain_arguments(self._early)
                yield from self._begin(self._name)
                yield Arguments(arguments)
        elif key in ARGUMENT_KEYS and self._early is None:
            yield from self._arguments()
        else:
            value = yield from self._feed.read_span(JsonValue())
            self._has_other_object = self._has_other_object or value.startswith("{")

    def _arguments(self) -> Parse:
        if self._name is None:
            self._early = yield from self._feed.read_span(JsonValue())
        elif (yield from self._feed.peek()) != "{":
            arguments = plain_arguments((yield from self._feed.read_span(JsonValue())))
            yield from self._begin(self._name)
            yield Arguments(arguments)
        elif (form := (yield from object_form(self._feed))) is None:
            raise NotACallError("arguments are no object")
        else:
            yield from self._begin(self._name)
            yield from self._feed.copy_as(Arguments, form, *self._stops)

    def _begin(self, name: str) -> Parse:
        self._has_arguments = True
        self._feed.recorded()
        yield CallStart(name)


def plain_arguments(value: str) -> str:
    """Convert arguments to a JSON object: models also write the object as a JSON string, or null.

    Raises NotACallError for any other value.
    """
    try:
        text = text_of(value).strip() if value.startswith('"') else value
    except ValueError as error:
        raise NotACallError("arguments are no text") from error
    arguments = NO_ARGUMENTS if text in EMPTY else mended(text)
    if arguments is None or not arguments.startswith("{"):
        raise NotACallError("arguments are no object")
    return arguments


def _accept(feed: Feed, char: str) -> Wait[bool]:
    """Read white space, and `char` if it comes next; return True if it did."""
    yield from feed.space()
    return (yield from feed.accept(char))


def _expect(feed: Feed, char: str) -> Wait[None]:
    if not (yield from _accept(feed, char)):
        raise NotACallError(f"no {char}")


def _string(feed: Feed) -> Wait[str]:
    yield from feed.space()
    text = yield from feed.read_span(JsonValue())
    try:
        return text_of(text)
    except ValueError as error:
        raise NotACallError("no text") from error


def text_of(literal: str) -> str:
    """Decode a JSON string; lone surrogates become U+FFFD. Raises ValueError if it is not a JSON string."""
    if not literal.startswith('"'):
        raise ValueError("not a string")
    value: str = json.loads(literal, strict=False)
    return encodable(value)


def arguments_of(lark: Lark, function: Function) -> str:
    """Return a Lark expression of the JSON objects that are valid arguments of `function`."""
    parameters = {**closed(function.parameters), "type": "object"}
    return lark.json(parameters, strict=function.strict, owner=function.owner)


def closed(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema with `additionalProperties` forbidden, unless the schema says otherwise.

    Properties that are required but not listed stay allowed. A schema whose properties may come from other
    keywords, or that has no `properties`, is not closed.
    """
    if not parameters:
        return NO_PARAMETERS
    if "properties" not in parameters or _COMBINING & parameters.keys():
        return {"type": "object", **parameters}
    listed, required = parameters["properties"], parameters.get("required")
    if "additionalProperties" not in parameters and isinstance(listed, dict) and isinstance(required, list):
        added = {name: True for name in required if isinstance(name, str) and name not in listed}
        parameters = {**parameters, "properties": {**listed, **added}}
    return {"type": "object", "additionalProperties": False, **parameters}


def call_of(lark: Lark, functions: Sequence[Function], key: str = "arguments") -> str:
    """Return a Lark expression of a JSON object that calls one of `functions`; `key`: key of arguments."""
    return lark.rule(f"{lark.literal(CALL_BEGIN)} {call_rest(lark, functions, key)}")


def call_rest(lark: Lark, functions: Sequence[Function], key: str) -> str:
    """Return the part of the expression `call_of` after CALL_BEGIN."""
    calls = [
        lark.rule(
            lark.literal(json.dumps(function.name) + f', "{key}": ')
            + f" {arguments_of(lark, function)} "
            + lark.literal("}")
        )
        for function in functions
    ]
    return lark.rule(one_of(calls))


def list_of_calls(lark: Lark, functions: Sequence[Function], most: int, end: str = "") -> str:
    """Return a Lark expression of a JSON list of one to `most` calls, followed by the text `end`."""
    calls = repeated(call_of(lark, functions), lark.literal(", "), most)
    return f"{lark.literal('[')} {calls} {lark.literal(']' + end)}"
