"""Calls that are JSON objects: `{"name": "f", "arguments": {"a": 1}}`, alone or in a list.

`arguments` may be named `parameters`, come before the name, be a text of JSON, or be missing. Valid JSON
arguments are passed on as the model writes them, white space included; faulty ones are repaired
(`MendedJson`). An object is not a call if its arguments are not an object, or if an object has another name
instead of arguments: a call without them would have another effect.
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
_COMBINING = {"allOf", "anyOf", "oneOf", "$ref", "patternProperties"}  # may list arguments, too


class NotACallError(LlmError):
    """The text is not a call. Never leaves this module: such text becomes content."""


class MarkedCalls:
    """Base of ToolDialects with calls inside content, after one of `begins`; here a JSON list of calls."""

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
        """Return an expression of the calls after their begin mark."""
        return list_of_calls(lark, functions, most)


def parse_calls(
    feed: Feed, before: str = "", names: Collection[str] | None = None, stops: Collection[str] = ()
) -> CallParse:
    """Yields the next call, or list of calls; if there is none, content including the text `before` it.

    Returns True if there was a call. With `names`, only the JSON distinguishes a call from content: it is a
    call only with one of these names and arguments. One of `stops`, which begin with a line end, ends a
    string in arguments that lacks its quote.
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
    """Drops closing brackets that were not opened; white space after them is content."""
    space = yield from feed.space()
    while (yield from feed.accept("}", "]")):
        space = yield from feed.space()
    yield Content(space)


def more_of(feed: Feed, mark: str) -> Wait[str]:
    """Reads white space and repeated marks."""
    pieces = []
    while True:
        pieces.append((yield from feed.space()))
        if not (yield from feed.accept(mark)):
            return "".join(pieces)
        pieces.append(mark)


def object_form(feed: Feed) -> Wait[MendedJson | None]:
    """Reads the beginning of the next object and returns its form, or None if there is no object."""
    if not (yield from feed.accept("{")):
        return None
    space = yield from feed.space()
    return MendedJson("{", space) if begins_member((yield from feed.peek())) else None


class _CallReader:
    """Reads one object. Drops the feed's record once it is known to be a call."""

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
        """Reads the object's remainder after its arguments; malformed text becomes content."""
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
    """Converts arguments to the usual form, an object: models also write it as a text, or null.

    Raises NotACallError for anything else.
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
    """Reads `char` if it comes next after white space; returns True if so."""
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
    """Decodes a JSON string; lone surrogates become U+FFFD. Raises ValueError for other JSON."""
    if not literal.startswith('"'):
        raise ValueError("not a string")
    value: str = json.loads(literal, strict=False)
    return encodable(value)


def arguments_of(lark: Lark, function: Function) -> str:
    """Returns an expression of the arguments that fit, an object."""
    parameters = {**closed(function.parameters), "type": "object"}
    return lark.json(parameters, strict=function.strict, owner=function.owner)


def closed(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Forbids arguments that the schema neither lists nor requires, unless it allows them explicitly."""
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
    """Returns an expression of a call of one of `functions`, an object."""
    return lark.rule(f"{lark.literal(CALL_BEGIN)} {call_rest(lark, functions, key)}")


def call_rest(lark: Lark, functions: Sequence[Function], key: str) -> str:
    """Returns an expression of the part of `call_of` after CALL_BEGIN."""
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
    """Returns an expression of a JSON list of one to `most` calls, with `end` after it."""
    calls = repeated(call_of(lark, functions), lark.literal(", "), most)
    return f"{lark.literal('[')} {calls} {lark.literal(']' + end)}"
