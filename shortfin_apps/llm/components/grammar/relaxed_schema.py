"""Finds the keywords of a JSON schema that the llguidance library cannot enforce, and relaxes the schema."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from shortfin_apps.llm.components.grammar.json_schema import (
    ANNOTATIONS,
    COUNTS,
    NAMED_SCHEMAS,
    SCHEMA_LISTS,
    SCHEMAS,
    Check,
    Schema,
    mapped,
    pointed,
)

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
# Type names of programming languages, which some clients send, and the JSON types that they mean.
TYPE_NAMES = {
    "bool": "boolean",
    "int": "integer",
    "long": "integer",
    "float": "number",
    "double": "number",
    "str": "string",
    "list": "array",
    "tuple": "array",
    "dict": "object",
    "map": "object",
    "none": "null",
}
MAX_CHECKS = 500  # calls of the library per schema; one takes about 0.3 ms
_LIMITS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_DEFINITIONS = ("$defs", "definitions")


def first_fault(schema: Schema, check: Check) -> str:
    """Return the path of a keyword that cannot be enforced, or of contradictory keywords, with the reason.

    Returns "" if none is found within MAX_CHECKS checks. The library does not read unused definitions, so
    these are checked last.
    """
    check, used = _limited(check, ""), _without_unused(schema)
    found = _keyword_faults(used, schema, check) or _contradictions(used, check)
    found = found or _keyword_faults(schema, schema, check)
    return found[0] if found else _contradiction(schema, "", check)


def _limited(check: Check, otherwise: str) -> Check:
    """Wrap a check: after MAX_CHECKS calls it returns `otherwise` without asking the library."""
    left = iter(range(MAX_CHECKS))
    return lambda schema: otherwise if next(left, None) is None else check(schema)


def _keyword_faults(schema: Schema, root: Schema, check: Check) -> list[str]:
    faults: list[str] = []

    def look(node: Schema, path: str) -> Schema:
        for keyword, value in node.items():
            if reason := _fault(node, keyword, value, root, check):
                faults.append(f"`{path}{keyword}`: {reason}")
        return node

    mapped(schema, look)
    return faults


def _contradictions(schema: Schema, check: Check) -> list[str]:
    """Return the contradiction in the first refused schema object, innermost first; empty if there is none.

    Objects with references are skipped, because they cannot be checked without the rest of the schema.
    """
    found: list[str] = []

    def look(node: Schema, path: str) -> Schema:
        if not found and not _references(node) and (reason := _contradiction(node, path, check)):
            found.append(reason)
        return node

    mapped(schema, look)
    return found


def _contradiction(node: Schema, path: str, check: Check) -> str:
    keywords = ", ".join(f"`{path}{keyword}`" for keyword in node if keyword not in ANNOTATIONS)
    return f"{keywords}: {reason}" if (reason := check(node)) else ""


def relaxed(schema: Schema, check: Check) -> Schema:
    """Return a schema that the library can enforce and that accepts every value that `schema` accepts.

    At worst the result accepts any value, or any object if the root has type object. After MAX_CHECKS checks,
    every keyword is treated as unenforceable.
    """
    limited = _limited(check, "the schema has too many keywords")
    looser: Schema = mapped(schema, lambda node, path: _loosened(node, schema, limited))
    if not check(looser):
        return looser
    properties = looser.get("properties")
    any_value: Schema = {"type": "object"} if looser.get("type") == "object" else {}
    if not isinstance(properties, dict):
        return any_value
    kept = {**looser, "properties": dict.fromkeys(properties, True)}
    if check(kept):
        return any_value
    for name, value in properties.items():
        with_one = {**kept, "properties": {**kept["properties"], name: value}}
        kept = kept if limited(with_one) else with_one
    return kept


def _references(schema: Schema) -> frozenset[str]:
    found: set[str] = set()

    def look(node: Schema, path: str) -> Schema:
        if isinstance(reference := node.get("$ref"), str):
            found.add(reference)
        return node

    mapped(schema, look)
    return frozenset(found)


def _without_unused(schema: Schema) -> Schema:
    kept, used = dict(schema), _references(schema)
    for keyword in _DEFINITIONS:
        if isinstance(definitions := schema.get(keyword), dict):
            beginnings = {name: f"#/{keyword}/{name}" for name in definitions}
            kept[keyword] = {
                name: each
                for name, each in definitions.items()
                if any(reference.startswith(beginnings[name]) for reference in used)
            }
    return kept


def _loosened(node: Schema, root: Schema, check: Check) -> Schema:
    """Remove a node's unenforceable keywords.

    If the library still refuses the node, only its type and its definitions are kept.
    """
    kept = _without_faults(node, root, check)
    if _references(kept) or not check(kept):
        return kept
    only_type = {"type": kept["type"]} if "type" in kept else {}
    return {**only_type, **{name: kept[name] for name in _DEFINITIONS if name in kept}}


def _without_faults(node: Schema, root: Schema, check: Check) -> Schema:
    kept = dict(node)
    for keyword, value in node.items():
        if keyword not in kept or not _fault(node, keyword, value, root, check):
            continue
        del kept[keyword]
        match keyword:
            case "type" if isinstance(value, str) and value.lower() in TYPE_NAMES:
                kept["type"] = TYPE_NAMES[value.lower()]
            case "patternProperties":  # or `additionalProperties` would forbid names that a pattern allowed
                kept.pop("additionalProperties", None)
            case "properties" if isinstance(value, dict):
                kept[keyword] = {name: each if _is_schema(each) else True for name, each in value.items()}
            case "required" if isinstance(value, list):
                kept[keyword] = [name for name in value if name in _names(node)]
    return kept


def _names(node: Schema) -> list[Any]:
    properties = node.get("properties")
    return list(properties) if isinstance(properties, dict) else []


def _fault(node: Schema, keyword: str, value: object, root: Schema, check: Check) -> str:
    """Return why the library cannot enforce a keyword, or "" if it can, considered without other keywords."""
    if reason := _wrong_form(keyword, value):
        return reason
    match keyword:
        case "pattern":
            return _of_pattern(check({"type": "string", "pattern": value}))
        case "patternProperties":
            return _of_pattern(check({"type": "object", keyword: dict.fromkeys(_names_of(value), True)}))
        case "$ref":
            return _of_reference(str(value), root, check)
        case "required":
            missing = [name for name in _names_of(value) if name not in _names(node)]
            is_closed = node.get("additionalProperties") is False and not node.get("patternProperties")
            return f"`properties` does not list {missing[0]!r}" if missing and is_closed else ""
        case _ if keyword in _LIMITS:
            return check({"type": "number", keyword: value})
    return ""


def _of_reference(reference: str, root: Schema, check: Check) -> str:
    if reference == "#" or reference.startswith("#/"):
        return "" if pointed(root, reference) is not None else f"{reference} does not exist in the schema"
    return check({**{key: root[key] for key in _DEFINITIONS if key in root}, "$ref": reference})


def _names_of(value: object) -> list[Any]:
    return list(value) if isinstance(value, dict | list) else []


def _of_pattern(reason: str) -> str:
    """Shorten the library's error for a regular expression, which begins with the expression itself."""
    return reason.rpartition("error: ")[2]


def _wrong_form(keyword: str, value: object) -> str:
    for keywords, is_right, form in _FORMS:
        if keyword in keywords:
            return "" if is_right(value) else f"must be {form}"
    return ""


def _is_schema(value: object) -> bool:
    return isinstance(value, dict | bool)


def _is_type(value: object) -> bool:
    names = [value] if isinstance(value, str) else value
    return isinstance(names, list) and bool(names) and all(_is_text(name) and name in TYPES for name in names)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


_FORMS: tuple[tuple[frozenset[str], Callable[[object], bool], str], ...] = (
    (frozenset({"type"}), _is_type, "a JSON type or a list of JSON types"),
    (frozenset({"enum"}), lambda value: isinstance(value, list) and bool(value), "a list of values"),
    (frozenset({"pattern", "format", "$ref"}), _is_text, "a text"),
    (
        frozenset({"required"}),
        lambda value: isinstance(value, list) and all(map(_is_text, value)),
        "a list of names",
    ),
    (
        COUNTS,
        lambda value: isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63,
        "a whole number",
    ),
    (
        frozenset({"exclusiveMinimum", "exclusiveMaximum"}),
        lambda value: isinstance(value, bool) or _is_number(value),
        "a number",
    ),
    (_LIMITS, _is_number, "a number"),
    (
        NAMED_SCHEMAS - {"$defs", "definitions", "dependentSchemas"},
        lambda value: isinstance(value, dict) and all(map(_is_schema, value.values())),
        "an object of schemas",
    ),
    (
        frozenset({"items"}),
        lambda value: _is_schema(value) or (isinstance(value, list) and all(map(_is_schema, value))),
        "a schema",
    ),
    (
        SCHEMA_LISTS,
        lambda value: isinstance(value, list) and bool(value) and all(map(_is_schema, value)),
        "a list of schemas",
    ),
    (SCHEMAS, _is_schema, "a schema"),
)
