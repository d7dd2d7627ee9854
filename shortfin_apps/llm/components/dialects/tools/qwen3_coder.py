"""Qwen3-Coder and Qwen3.5: calls in tags, with each parameter's text between tags of its own.

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
from collections.abc import Mapping, Sequence
from typing import Any

from shortfin_apps.llm.components.dialects.dialect import Function
from shortfin_apps.llm.components.dialects.feed import Feed
from shortfin_apps.llm.components.dialects.lark import ANY_TEXT, Lark, one_of, repeated
from shortfin_apps.llm.components.dialects.pieces import Arguments, CallStart, Content, Parse

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
TAGS = f"{BEGIN}\n{FUNCTION}"  # before the name
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


class Qwen3Coder:
    """Implements ToolDialect. The types of parameters in their schema tell numbers from texts."""

    marks = frozenset({BEGIN, END})
    id_chars: int | None = None

    def parse(self, feed: Feed, functions: Sequence[Function]) -> Parse:
        schemas = {function.name: function.parameters for function in functions}
        while (mark := (yield from feed.copy(Content, BEGIN, FUNCTION))) is not None:
            before = mark
            if mark == BEGIN:
                before += yield from feed.space()
                if not (yield from feed.accept(FUNCTION)):
                    yield Content(before)
                    continue
                before += FUNCTION
            yield from _call(feed, before, schemas)

    def calls(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        call = lark.rule(f"{lark.literal(TAGS)} {_rest(lark, functions)}")
        return repeated(call, lark.literal("\n"), most)

    def answer(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        rest = _rest(lark, functions)
        behind_tag = f"{lark.literal(TAGS.removeprefix(BEGIN))} {rest}"
        begun = one_of([f"{lark.through(BEGIN)} {behind_tag}", f"{lark.through(FUNCTION)} {rest}"])
        return f"{begun}* {ANY_TEXT}"


def _call(feed: Feed, before: str, schemas: Mapping[str, Mapping[str, Any]]) -> Parse:
    name, mark = yield from feed.text_before(">", "\n")
    if mark != ">":
        yield Content(before + name + (mark or ""))
        return
    yield CallStart(name)
    yield from _arguments(feed, _properties(schemas.get(name, {})))
    yield from feed.space()
    yield from feed.accept(END)


def _arguments(feed: Feed, properties: Mapping[str, Any]) -> Parse:
    yield Arguments("{")
    separator = ""
    yield from feed.space()
    while (yield from feed.accept(PARAMETER)):
        key, _ = yield from feed.text_before(">")
        yield Arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        yield from _value(feed, properties.get(key))
        separator = ", "
        yield from feed.space()
    if (yield from feed.accept(FUNCTION_END)):
        yield Arguments("}")


def _value(feed: Feed, schema: object) -> Parse:
    """JSON of the text up to the end of its parameter, of a type that the schema allows."""
    yield from feed.accept("\n")
    types = _types(schema)
    if types != {"string"}:
        text, _ = yield from feed.text_before("\n" + PARAMETER_END, PARAMETER_END)
        yield Arguments(_typed(text, types))
        return
    yield Arguments('"')
    if (yield from feed.copy(_inside_string, "\n" + PARAMETER_END, PARAMETER_END)) is not None:
        yield Arguments('"')


def _inside_string(text: str) -> Arguments:
    return Arguments(json.dumps(text, ensure_ascii=False)[1:-1])


def _typed(text: str, types: set[str]) -> str:
    """The text itself where it is JSON of one of the types, else the text as a JSON string."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        value = text
    is_json = value is not text and any(_is(value, each) for each in types)
    return text.strip() if is_json else json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    """Raises ValueError for NaN and infinities, which Python reads but which are no JSON."""
    raise ValueError(f"{constant} is not JSON")


def _is(value: object, name: str) -> bool:
    is_boolean = isinstance(value, bool)
    return isinstance(value, _TYPES.get(name, ())) and is_boolean == (name == "boolean")


def _properties(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = parameters.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _types(schema: object) -> set[str]:
    """The JSON types that a schema names; text if it names none, all for one that is elsewhere."""
    if not isinstance(schema, Mapping):
        return {"string"}
    if isinstance(options := schema.get("anyOf") or schema.get("oneOf"), list):
        return set().union(*(_types(option) for option in options))
    if "$ref" in schema:
        return set(_TYPES)
    named = schema.get("type", "string" if "enum" not in schema else list(_TYPES))
    if not isinstance(named, str | list):  # of a schema that is wrong
        return set(_TYPES)
    return {named} if isinstance(named, str) else {str(name) for name in named}


def _rest(lark: Lark, functions: Sequence[Function]) -> str:
    """A call behind TAGS."""
    return lark.rule(one_of([_call_expression(lark, function) for function in functions]))


def _call_expression(lark: Lark, function: Function) -> str:
    given = function.parameters.get("required")
    required = given if isinstance(given, list) else []
    parameters = [
        expression if key in required else f"({expression})?"
        for key, schema in _properties(function.parameters).items()
        for expression in [_parameter_expression(lark, function, key, schema)]
    ]
    begin = lark.literal(f"{function.name}>\n")
    return lark.rule(" ".join([begin, *parameters, lark.literal(f"{FUNCTION_END}\n{END}")]))


def _parameter_expression(lark: Lark, function: Function, key: str, schema: object) -> str:
    begin, end = lark.literal(f"{PARAMETER}{key}>\n"), f"\n{PARAMETER_END}\n"
    if isinstance(schema, Mapping) and _types(schema) == {"string"}:
        if isinstance(options := schema.get("enum"), list) and options:
            return f"{begin} {one_of([lark.literal(str(option)) for option in options])} {lark.literal(end)}"
        return f"{begin} {lark.through(end)}"
    definitions = {
        name: function.parameters[name] for name in ("$defs", "definitions") if name in function.parameters
    }
    of_value = {**definitions, **schema} if isinstance(schema, Mapping) else {}
    return f"{begin} {lark.json(of_value, strict=function.strict, owner=function.owner)} {lark.literal(end)}"
