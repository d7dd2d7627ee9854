"""Value types and object members that a JSON schema allows, following `$ref` and `allOf`.

Each part of a schema is read once, because references may multiply.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any
from urllib.parse import unquote

MAX_DIGITS = 10  # of an index in a reference
MAX_DEPTH = 32  # of nested references and alternatives
_TYPES = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
_DEFINITION_PATHS = ("#/$defs/", "#/definitions/")
_WHOLE = "arguments"
_WITHIN = {"number": frozenset({"number", "integer"})}


class SchemaTypes:
    """The value types that parts of the schema `root` allow."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self._known: dict[int, Set[str] | None] = {}  # by the part's id; None: unspecified

    def of(self, schema: object) -> Set[str]:
        """Returns the types of values that fit `schema`, a part of the root; string if unspecified."""
        return self._types(schema, 0) or {"string"}

    def _types(self, schema: object, depth: int) -> Set[str] | None:
        if not isinstance(schema, Mapping):
            return None
        if depth > MAX_DEPTH:
            return _TYPES
        if id(schema) not in self._known:
            self._known[id(schema)] = _TYPES  # until it has been read
            said = [types for types in self._said(schema, depth + 1) if types is not None]
            self._known[id(schema)] = (_TYPES.intersection(*said) or _TYPES) if said else None
        return self._known[id(schema)]

    def _said(self, schema: Mapping[str, Any], depth: int) -> Iterator[Set[str] | None]:
        """Yields the types that each keyword allows, None if it does not specify any."""
        if "type" in schema:
            named = schema["type"]
            yield _named(named if isinstance(named, list) else [named])
        if "const" in schema:
            yield types_of_value(schema["const"])
        if isinstance(values := schema.get("enum"), list):
            yield set[str]().union(*map(types_of_value, values))
        if "$ref" in schema:
            target = resolved(schema["$ref"], self.root)
            yield _TYPES if target is None else self._types(target, depth)
        for key in ("anyOf", "oneOf"):
            if options := list_of(schema, key):
                yield set[str]().union(*(self._types(option, depth) or _TYPES for option in options))
        for part in list_of(schema, "allOf"):
            yield self._types(part, depth)


def types_of_value(value: object) -> Set[str]:
    """Returns the JSON schema types of a value."""
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
    """Returns the part of `root` that a reference such as `#/$defs/name` names, or None."""
    part: object = root
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for name in _names_in(reference):
        if isinstance(part, list) and name.isdecimal() and len(name) < MAX_DIGITS and int(name) < len(part):
            part = part[int(name)]
        else:
            part = part.get(name) if isinstance(part, Mapping) else None
    return part


def _names_in(reference: str) -> list[str]:
    """Returns the names and indices of a JSON pointer in a URI fragment (RFC 6901)."""
    return [unquote(name).replace("~1", "/").replace("~0", "~") for name in reference[1:].split("/")[1:]]


def part_alone(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a part of `root` as a self-contained schema, including the targets of its references."""
    references = list(_references(schema, root))
    if all(reference.startswith(_DEFINITION_PATHS) for reference in references):
        return {
            **_definitions(root, dict.fromkeys(tuple(_names_in(each)[:2]) for each in references)),
            **schema,
        }
    moved: dict[str, Any] = _with_moved_references(schema)
    return {**moved, "$defs": {_WHOLE: _with_moved_references(root)}}


def _definitions(root: Mapping[str, Any], paths: Iterable[Sequence[str]]) -> dict[str, dict[str, Any]]:
    """Returns the definitions of `root` at paths such as ("$defs", "name")."""
    used: dict[str, dict[str, Any]] = {}
    for key, name in paths:
        if isinstance(table := root.get(key), Mapping) and name in table:
            used.setdefault(key, {})[name] = table[name]
    return used


def _references(schema: object, root: Mapping[str, Any]) -> Iterator[str]:
    """Yields the references to parts of `root` in `schema` and in their targets. Visits each part once."""
    left, seen = [schema], set[str | int]()  # references, and ids of parts
    while left:
        part = left.pop()
        if not isinstance(part, list | Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, list):
            left += part
            continue
        left += part.values()
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            if reference.startswith("#"):
                yield reference
                left.append(resolved(reference, root))


def _with_moved_references(schema: Any) -> Any:
    """Rewrites references for a new root that has the present root as a definition."""
    if isinstance(schema, list):
        return [_with_moved_references(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _with_moved_references(each) for key, each in schema.items()}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/{_WHOLE}{reference[1:]}"
    return moved


def parts_of(parameters: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the schema of an object and the schemas that its `$ref` and `allOf` add."""
    return _parts(parameters, parameters, set())


def properties_of(parameters: Mapping[str, Any]) -> Mapping[str, object]:
    """Returns the schemas of an object's properties by name, also from `$ref`, `allOf` and alternatives."""
    seen: set[int] = set()
    own = list(_parts(parameters, parameters, seen))
    options = [each for part in own for key in ("anyOf", "oneOf") for each in list_of(part, key)]
    others = [part for option in options for part in _parts(option, parameters, seen)]
    return _properties(others, "anyOf") | _properties(own, "allOf")


def required_of(parameters: Mapping[str, Any]) -> Set[str]:
    """Returns the names of the properties that an object must have."""
    names = [name for part in parts_of(parameters) for name in list_of(part, "required")]
    return {name for name in names if isinstance(name, str)}


def list_of(schema: Mapping[str, Any], key: str) -> list[object]:
    """Returns the list at `key`, or an empty list."""
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _parts(schema: object, root: Mapping[str, Any], seen: set[int]) -> Iterator[Mapping[str, Any]]:
    """Yields the schemas that must all fit, except parts already `seen`."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, Mapping) and id(part) not in seen:
            seen.add(id(part))
            yield part
            target = [resolved(part["$ref"], root)] if "$ref" in part else []
            left += reversed([*target, *list_of(part, "allOf")])


def _properties(parts: Sequence[Mapping[str, Any]], key: str) -> dict[str, object]:
    """Returns schemas by name; schemas of the same name are combined with the keyword `key`."""
    found: dict[str, list[object]] = {}
    for part in parts:
        if isinstance(properties := part.get("properties"), Mapping):
            for name, schema in properties.items():
                found.setdefault(name, []).append(schema)
    return {name: schemas[0] if len(schemas) == 1 else {key: schemas} for name, schemas in found.items()}


def _named(names: list[object]) -> Set[str]:
    """Returns the named types, or all types if a name is not a JSON schema type."""
    known = [_WITHIN.get(name, {name}) for name in names if isinstance(name, str) and name in _TYPES]
    return set[str]().union(*known) if len(known) == len(names) else _TYPES
