"""The JSON types that a schema allows, as far as it says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

_TYPES = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
_WITHIN = {"number": frozenset({"number", "integer"})}
MAX_REFERENCES = 16  # in each other


def types_of(schema: object, root: Mapping[str, Any]) -> Set[str]:
    """The types of values that fit `schema`, which is part of `root`; text if it says nothing."""
    return _types(schema, root, 0) or {"string"}


def types_of_value(value: object) -> Set[str]:
    """The types that a value is of."""
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"integer", "number"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case _:
            return {"array" if isinstance(value, list) else "object"}


def resolved(reference: object, root: Mapping[str, Any]) -> object:
    """The part of `root` that a reference, as `#/$defs/name`, names; None if there is none."""
    part: object = root
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for name in reference[1:].split("/")[1:]:
        part = part.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
    return part


def _types(schema: object, root: Mapping[str, Any], depth: int) -> Set[str] | None:
    """None: it does not say."""
    if not isinstance(schema, Mapping):
        return None
    if depth > MAX_REFERENCES:
        return _TYPES
    said = [types for types in _said(schema, root, depth + 1) if types is not None]
    return (_TYPES.intersection(*said) or _TYPES) if said else None


def _said(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Iterator[Set[str] | None]:
    """What each of its keywords says."""
    if "type" in schema:
        named = schema["type"]
        yield _named(named if isinstance(named, list) else [named])
    if "const" in schema:
        yield types_of_value(schema["const"])
    if isinstance(values := schema.get("enum"), list):
        yield set[str]().union(*map(types_of_value, values))
    if "$ref" in schema:
        target = resolved(schema["$ref"], root)
        yield _TYPES if target is None else _types(target, root, depth)
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), list):
            yield set[str]().union(*(_types(option, root, depth) or _TYPES for option in options))
    if isinstance(parts := schema.get("allOf"), list):
        yield from (_types(part, root, depth) for part in parts)


def _named(names: list[object]) -> Set[str]:
    """Those of `names`; all if one is no type of JSON schema."""
    known = [_WITHIN.get(name, {name}) for name in names if isinstance(name, str) and name in _TYPES]
    return set[str]().union(*known) if len(known) == len(names) else _TYPES
