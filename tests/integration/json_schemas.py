"""200 schemas with the constructs of JSONSchemaBench's categories, whose values are all short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

WORD = {"type": "string", "maxLength": 6}
SMALL = {"type": "integer", "minimum": -20, "maximum": 300}


def _object(properties: Schema, **keywords: Any) -> Schema:
    closed = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **closed, **keywords}


def function_call(index: int) -> Schema:
    """As in Glaive's: a flat object of a function's arguments."""
    kinds = [WORD, SMALL, {"type": "boolean"}, {"enum": ["celsius", "fahrenheit", None]}]
    return _object({f"argument_{i}": kinds[(index + i) % 4] for i in range(1 + index % 4)})


def settings(index: int) -> Schema:
    """As in JSON Schema Store's and GitHub's: optional fields, unions of types, lists."""
    names = {"type": "array", "items": WORD, "minItems": index % 2, "maxItems": 3}
    union = {"anyOf": [WORD, SMALL, {"type": "null"}]}
    properties = {
        "name": WORD,
        "names": names,
        "value": union,
        "level": {"type": ["integer", "null"], **LEVELS},
    }
    return _object(properties, required=list(properties)[: index % 5])


LEVELS = {"minimum": 0, "maximum": 9}


def manifest(index: int) -> Schema:
    """As in Kubernetes': definitions, nested, with constants."""
    port = _object({"port": {"type": "integer", "minimum": 1, "maximum": 65_535}, "name": WORD})
    spec = _object({"ports": {"type": "array", "items": {"$ref": "#/$defs/port"}, "maxItems": 1 + index % 3}})
    top = _object({"kind": {"const": f"Kind{index}"}, "spec": {"$ref": "#/$defs/spec"}})
    return {**top, "$defs": {"port": port, "spec": spec}}


def event(index: int) -> Schema:
    """As in Snowplow's: texts of formats and patterns."""
    texts = [
        {"type": "string", "format": "date"},
        {"type": "string", "format": "uuid"},
        {"type": "string", "format": "ipv4"},
        {"type": "string", "pattern": f"^[A-Z]{{2}}-[0-9]{{1,{1 + index % 5}}}$"},
        {"type": "string", "minLength": 2, "maxLength": 5},
    ]
    return _object({"first": texts[index % 5], "second": texts[(index // 5) % 5]})


def story(index: int) -> Schema:
    """As in the Washington Post's: variants told apart by a constant, and trees of bounded depth."""
    variants = [
        _object({"type": {"const": name}, "content": kind}) for name, kind in (("a", WORD), ("b", SMALL))
    ]
    tree: Schema = _object({"leaf": SMALL})
    for _ in range(index % 4):
        tree = _object(
            {"child": tree, "tags": {"type": "array", "prefixItems": [WORD, SMALL], "items": False}}
        )
    return _object({"element": {"oneOf": variants}, "tree": tree})


MAKERS: tuple[Callable[[int], Schema], ...] = (function_call, settings, manifest, event, story)
SCHEMAS = [make(index) for make in MAKERS for index in range(40)]
