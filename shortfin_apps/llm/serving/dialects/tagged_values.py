"""Arguments of tool calls as text in tags, whose schemas decide whether a text is a string or other JSON."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence, Set
from typing import Any

from shortfin_apps.llm.serving.dialects.argument_schemas import (
    SchemaTypes,
    fitting_text,
    part_alone,
    parts_of,
    properties_of,
    refused,
    required_of,
    types_of_value,
)
from shortfin_apps.llm.serving.dialects.dialect import Function
from shortfin_apps.llm.serving.dialects.feed import Arguments, Feed, Piece
from shortfin_apps.llm.serving.dialects.lark import ANY_TEXT, Lark
from shortfin_apps.llm.serving.dialects.mended_json import mended, scalar

_UNKEPT = frozenset(  # keywords about all arguments together, which the grammar of tags cannot enforce
    {
        *("anyOf", "oneOf", "not", "if", "then", "else", "minProperties", "maxProperties"),
        *("patternProperties", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
    }
)
_TRIVIAL: tuple[object, ...] = ({}, [], {"type": "string"})  # values of _UNKEPT keywords that forbid nothing


def json_value(feed: Feed, types: Set[str], ends: Sequence[str]) -> Generator[Piece | None, None, str | None]:
    """Yield the text up to the first of the tags `ends` as JSON of one of `types`; return the tag."""
    if types != {"string"}:
        text, mark = yield from feed.text_before(*ends)
        if mark is not None or not feed.is_cut:
            yield Arguments(_typed(text, types))
        return mark
    yield Arguments('"')
    mark = yield from feed.copy(_inside_string, *ends)
    if mark is not None or not feed.is_cut:
        yield Arguments('"')
    return mark


def _inside_string(text: str) -> Arguments:
    return Arguments(json.dumps(text, ensure_ascii=False)[1:-1])


def _typed(text: str, types: Set[str]) -> str:
    """Return the text as JSON of one of `types`; as a JSON string if it is not of these types."""
    stripped = text.strip()
    written = mended(stripped) if stripped[:1] in ("{", "[") else scalar(stripped)
    if written is None or not types & types_of_value(json.loads(written)):
        return json.dumps(text, ensure_ascii=False)
    return written


def written_properties(lark: Lark, function: Function) -> Iterator[tuple[str, object, bool]]:
    """Yield the name and schema of each argument that a grammar lets through, and whether it is required.

    Raises InvalidRequestError for a strict function with constraints that tags cannot keep.
    """
    lark.read_schema(function.parameters)
    properties, required = dict(properties_of(function.parameters)), required_of(function.parameters)
    properties |= {name: {} for name in sorted(required - properties.keys())}
    if function.strict:
        _check_kept(function.parameters)
    for name, schema in _that_tags_hold(properties, strict=function.strict).items():
        yield name, schema, name in required


def value_expression(lark: Lark, function: Function, schema: object, types: SchemaTypes, end: str) -> str:
    """Return a Lark expression of an argument's value and its end tag; `types`: of the function's schema."""
    if types.of(schema) == {"string"}:
        text = fitting_text(lark, schema, types, strict=function.strict)
        return lark.through(end, ANY_TEXT if text is None else lark.terminal(text))
    of_value = part_alone(schema, function.parameters) if isinstance(schema, Mapping) else {}
    return f"{lark.json(of_value, strict=function.strict, owner=function.owner)} {lark.literal(end)}"


def _that_tags_hold(properties: Mapping[str, object], *, strict: bool) -> dict[str, object]:
    """Return the properties with names that the parser reads back unchanged from a tag.

    If strict, raises InvalidRequestError for a property with another name.
    """
    kept = {
        name: each
        for name, each in properties.items()
        if name == name.strip() and not set(name) & set("<>\n")
    }
    if strict and (others := properties.keys() - kept.keys()):
        raise refused("properties", f"names {json.dumps(min(others))}, which a tag cannot hold")
    return kept


def _check_kept(parameters: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError for constraints that the grammar of arguments in tags cannot enforce."""
    listed, required = properties_of(parameters).keys(), required_of(parameters)
    for part in parts_of(parameters):
        for keyword in sorted(_UNKEPT & part.keys()):
            value = part[keyword]
            if not isinstance(value, int):
                is_kept = value in _TRIVIAL
            elif keyword == "minProperties":
                is_kept = value <= len(required)
            else:
                is_kept = keyword == "maxProperties" and value >= len(listed | required)
            if not is_kept:
                raise refused(keyword, "cannot be kept in this model's form of calls")
        if part.get("additionalProperties") is False and (missing := required - listed):
            raise refused("required", f"names `{min(missing)}`, which `additionalProperties` forbids")
