"""Rewrites a JSON schema to an equivalent one that the llguidance library can enforce.

The library refuses some keywords that have no effect. It also accepts some combinations of `properties` and
`patternProperties` under which an output can get stuck: it is incomplete, but no token may follow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

Schema = dict[str, Any]
Check = Callable[[Schema], str]  # returns why the library cannot use a schema, else ""

NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
SCHEMA_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
SCHEMAS = frozenset(
    {"items", "additionalItems", "additionalProperties", "propertyNames", "contains", "not"}
    | {"if", "then", "else", "unevaluatedItems", "unevaluatedProperties"}
)
COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
NO_BOUND = 1 << 31  # no output has as many characters, items or properties
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
DRAFTS = frozenset(
    {"https://json-schema.org/draft/2020-12/schema", "https://json-schema.org/draft/2019-09/schema"}
    | {f"http://json-schema.org/draft-0{number}/schema" for number in (4, 6, 7)}
)
ANNOTATIONS = frozenset(
    {"$anchor", "$comment", "$id", "$schema", "default", "deprecated", "description", "examples", "title"}
)
_TEXTS = frozenset({"$comment", "default", "description", "examples", "title"})
_ALWAYS_DROPPED = frozenset({"default", "examples", "x-guidance", "$dynamicAnchor", "$recursiveAnchor"})
_OBJECT_KEYWORDS = frozenset({"properties", "required", "patternProperties", "additionalProperties"})
_MAX_COMBINATIONS = 16


class SchemaError(ValueError):
    """A schema that cannot be enforced; the message is the reason, with the keyword's path."""


def mapped(schema: object, change: Callable[[Schema, str], object], path: str = "") -> Any:
    """Return the schema with every schema object replaced by `change(object, path)`, innermost first."""
    if not isinstance(schema, dict):
        return schema
    return change({key: _mapped_value(key, value, change, path) for key, value in schema.items()}, path)


def without_annotations(schema: object) -> Any:
    """Return the schema without descriptions, examples and other keywords that do not constrain values."""
    return mapped(schema, lambda node, path: {k: v for k, v in node.items() if k not in _TEXTS})


def _mapped_value(key: str, value: object, change: Callable[[Schema, str], object], path: str) -> object:
    if key in NAMED_SCHEMAS and isinstance(value, dict):
        return {name: mapped(each, change, f"{path}{key}.{name}.") for name, each in value.items()}
    if key in SCHEMA_LISTS and isinstance(value, list):
        return [mapped(each, change, f"{path}{key}.{place}.") for place, each in enumerate(value)]
    return mapped(value, change, f"{path}{key}.") if key in SCHEMAS else value


def equivalent(schema: Schema, check: Check) -> Schema:
    """Return an equivalent schema that the library can enforce.

    Raises SchemaError if an output could get stuck and no equivalent schema is known. Keywords that the
    library refuses for other reasons are kept.
    """
    plain: Schema = mapped(schema, lambda node, path: _plain(node))
    if not any(True for _ in _nodes_with(plain, "patternProperties")):
        return plain
    asked = _remembered(check)
    finished: Schema = mapped(plain, lambda node, path: _finishable(node, plain, path, asked))
    return finished


def _remembered(check: Check) -> Check:
    """Wrap a check with a cache, so that the library is called once per schema."""
    reasons: dict[str, str] = {}

    def remembered(schema: Schema) -> str:
        key = json.dumps(schema)
        if key not in reasons:
            reasons[key] = check(schema)
        return reasons[key]

    return remembered


def _plain(node: Schema) -> Schema:
    """Remove the keywords that have no effect, and convert counts like 3.0 to integers."""
    return {key: _number(key, value) for key, value in node.items() if not _has_no_effect(node, key)}


def _number(key: str, value: object) -> object:
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if key in COUNTS and is_whole and isinstance(value, float) else value


def _has_no_effect(node: Schema, key: str) -> bool:
    value = node[key]
    match key:
        case "format":  # an annotation
            return isinstance(value, str) and value not in FORMATS
        case "$schema":
            return isinstance(value, str) and value.removesuffix("#") not in DRAFTS
        case "maxLength" | "maxItems" | "maxProperties":
            return isinstance(value, int | float) and value >= NO_BOUND
        case "uniqueItems":
            return value is False or (value is True and node.get("maxItems") in (0, 1))
        case "propertyNames":
            return is_any(_without_type(value, "string"))
        case "unevaluatedProperties":
            return is_any(value) or "additionalProperties" in node
        case "unevaluatedItems":
            return is_any(value) or isinstance(node.get("items"), dict | bool)
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return isinstance(value, dict) and all(each == [] or is_any(each) for each in value.values())
        case "not":
            return value is False
        case "if":
            return all(is_any(node.get(branch, True)) for branch in ("then", "else"))
        case "then" | "else":
            return "if" not in node or is_any(value)
        case "contains" | "minContains" | "maxContains":
            return "contains" not in node or (node.get("minContains") == 0 and "maxContains" not in node)
    return key in _ALWAYS_DROPPED


def is_any(schema: object) -> bool:
    """Return whether a schema accepts every value: it is True, or has only annotations."""
    return schema is True or (isinstance(schema, dict) and schema.keys() <= ANNOTATIONS)


def _without_type(schema: object, name: str) -> object:
    if not isinstance(schema, dict) or name not in (schema.get("type"), *_listed(schema.get("type"))):
        return schema
    return {key: value for key, value in schema.items() if key != "type"}


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _nodes_with(schema: Schema, keyword: str) -> Iterator[Schema]:
    found: list[Schema] = []

    def look(node: Schema, path: str) -> Schema:
        if keyword in node:
            found.append(node)
        return node

    mapped(schema, look)
    yield from found


def _finishable(node: Schema, root: Schema, path: str, check: Check) -> Schema:
    """Return an equivalent of schema object `node` with which outputs cannot get stuck.

    Where every name that the patterns allow is already listed in `properties`, no name is left for a further
    property. The library still lets a further property begin, and the output is stuck. Such an object is
    closed: see `_closed`. Raises SchemaError if such an object is combined with other schemas.
    """
    combinations = list(islice(_combinations([node], root, frozenset()), _MAX_COMBINATIONS))
    stuck = [parts for parts in combinations if _has_patterns(parts) and _has_no_further_name(parts, check)]
    if not stuck:
        return node
    if len(combinations) == 1 and len(combinations[0]) == 1 and "patternProperties" in node:
        return _closed(node, check)
    raise SchemaError(
        f"`{path}patternProperties` leaves no name but the listed ones where schemas are combined;"
        " list them in `properties` instead"
    )


def _combinations(nodes: list[Any], root: Schema, seen: frozenset[str]) -> Iterator[list[Schema]]:
    """Yield the schema objects that jointly apply to a value: a list per choice of `anyOf` and `oneOf`."""
    pending, parts, choices = list(nodes), list[Schema](), list[list[Any]]()
    while pending:
        if not isinstance(node := pending.pop(), dict):
            continue
        if _OBJECT_KEYWORDS & node.keys():
            parts.append(node)
        if isinstance(reference := node.get("$ref"), str) and reference not in seen:
            seen |= {reference}
            pending.append(pointed(root, reference))
        pending += _listed(node.get("allOf"))
        choices += [options for keyword in ("anyOf", "oneOf") if (options := _listed(node.get(keyword)))]
    if not choices:
        yield parts
        return
    first, *others = choices
    for option in first:
        chosen = [option, *({"anyOf": options} for options in others)]
        yield from ([*parts, *rest] for rest in _combinations(chosen, root, seen))


def pointed(root: Schema, reference: str) -> object:
    """Return the target of a reference inside the schema, or None if it is external or missing."""
    if not reference.startswith("#"):
        return None
    value: object = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            value = value.get(key) if isinstance(value, dict) else None
    return value


def _has_patterns(parts: list[Schema]) -> bool:
    return any(part.get("patternProperties") for part in parts)


def _has_no_further_name(parts: list[Schema], check: Check) -> bool:
    """Return whether `parts` together allow no property name but the listed ones.

    Returns False if the library refuses `parts`.
    """
    names = {name: False for part in parts for name in _names(part)}
    open_parts = [{**_names_alone(part), "properties": names} for part in parts]
    if check({"allOf": open_parts}):
        return False
    return bool(check({"allOf": [{"type": "object", "minProperties": 1}, *open_parts]}))


def _names(part: Schema) -> list[str]:
    properties = part.get("properties")
    required = [name for name in _listed(part.get("required")) if isinstance(name, str)]
    return list(dict.fromkeys([*(properties if isinstance(properties, dict) else ()), *required]))


def _names_alone(part: Schema) -> Schema:
    """Return a schema object that allows the same unlisted property names, with any value."""
    patterns = part.get("patternProperties")
    return {
        "type": "object",
        "patternProperties": {name: each is not False for name, each in patterns.items()}
        if isinstance(patterns, dict)
        else {},
        "additionalProperties": part.get("additionalProperties", True) is not False,
    }


def _closed(node: Schema, check: Check) -> Schema:
    """Return the object without `patternProperties` and further names.

    The schema of each pattern is moved to the listed names that match the pattern.
    """
    rest = {key: value for key, value in node.items() if key != "patternProperties"}
    properties = {name: _property(node, name, check) for name in _names(node)}
    return {**rest, "properties": properties, "additionalProperties": False}


def _property(node: Schema, name: str, check: Check) -> object:
    given = node.get("properties")
    parts = [given[name]] if isinstance(given, dict) and name in given else []
    for pattern, schema in node["patternProperties"].items():
        if not check({"type": "string", "const": name, "pattern": pattern}):
            parts.append(schema)
    if not parts:
        return node.get("additionalProperties", True)
    return parts[0] if len(parts) == 1 else {"allOf": parts}
