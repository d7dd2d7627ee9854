from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from shortfin_apps.llm.serving.dialects.json_types import (
    SchemaTypes,
    part_alone,
    properties_of,
    required_of,
    resolved,
    types_of_value,
)

ALL = {"string", "integer", "number", "boolean", "object", "array", "null"}
ROOT = {
    "$defs": {
        "n": {"type": "integer"},
        "loop": {"$ref": "#/$defs/loop"},
        "many": {"anyOf": [{"$ref": "#/$defs/many"}] * 9, "allOf": [{"$ref": "#/$defs/loop"}] * 9},
        "a/b": {"enum": ["x", None]},
        "opt": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]},
    }
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({}, {"string"}),
        (True, {"string"}),
        ({"type": "boolean"}, {"boolean"}),
        ({"type": ["number", "null"]}, {"number", "integer", "null"}),
        ({"type": "any"}, ALL),
        ({"const": True}, {"boolean"}),
        ({"enum": ["a", 1]}, {"string", "integer", "number"}),
        ({"$ref": "#/$defs/n"}, {"integer"}),
        ({"$ref": "#/$defs/a~1b"}, {"string", "null"}),
        ({"$ref": "#/$defs/opt", "description": "d"}, {"integer", "null"}),
        ({"$ref": "#/$defs/none"}, ALL),
        ({"$ref": "#/$defs/loop"}, ALL),
        ({"$ref": "#/$defs/many"}, ALL),
        ({"allOf": [{"$ref": "#/$defs/n"}, {"minimum": 1}]}, {"integer"}),
        ({"allOf": [{"type": "number"}, {"type": ["integer", "string"]}]}, {"integer"}),
        ({"oneOf": [{"type": "array"}, {"minimum": 1}]}, ALL),
    ],
)
def test_a_schema_says_which_types_fit(schema: Any, types: set[str]) -> None:
    assert SchemaTypes(ROOT).of(schema) == types


def test_a_number_without_a_fraction_is_an_integer() -> None:
    assert "integer" in types_of_value(3.0)
    assert "integer" not in types_of_value(3.5)
    assert types_of_value(True) == {"boolean"}


def test_members_of_an_object_are_found_through_references_and_alternatives() -> None:
    parameters = {
        "$ref": "#/$defs/a",
        "allOf": [{"properties": {"x": {"minimum": 1}, "y": True}, "required": ["y"]}, {"$ref": "#/$defs/a"}],
        "anyOf": [{"properties": {"z": {"const": 1}, "x": {}}}, {"properties": {"z": {"const": 2}}}],
        "$defs": {"a": {"properties": {"x": {"type": "integer"}}, "required": ["x"], "$ref": "#"}},
    }
    assert properties_of(parameters) == {
        "x": {"allOf": [{"type": "integer"}, {"minimum": 1}]},
        "y": True,
        "z": {"anyOf": [{"const": 1}, {"const": 2}]},
    }
    assert required_of(parameters) == {"x", "y"}
    assert properties_of({"properties": None, "required": None}) == {}


POINTED: dict[str, Any] = {
    "properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
    "$defs": {
        "x y": {"type": "boolean"},
        "used": {"$ref": "#/$defs/x%20y"},
        "unused": {"description": "a" * 99},
    },
}


@pytest.mark.parametrize(
    ("reference", "part"),
    [
        ("#/properties/a/anyOf/0", {"type": "string"}),
        ("#/properties/a/anyOf/2", None),
        ("#/properties/a/anyOf/-1", None),
        ("#/properties/a/anyOf/" + "9" * 5000, None),
        ("#/$defs/x%20y", {"type": "boolean"}),
        ("#/$defs/x y", {"type": "boolean"}),
    ],
)
def test_references_are_json_pointers(reference: str, part: Any) -> None:
    assert resolved(reference, POINTED) == part


def test_a_part_alone_has_the_definitions_that_it_reaches() -> None:
    part = part_alone({"$ref": "#/$defs/used"}, POINTED)
    assert part == {
        "$ref": "#/$defs/used",
        "$defs": {name: POINTED["$defs"][name] for name in ("x y", "used")},
    }
    assert part_alone({"type": "null"}, POINTED) == {"type": "null"}


class Counted(list[Any]):
    """Counts how often it is looked through."""

    num_looks = 0

    def __iter__(self) -> Iterator[Any]:
        self.num_looks += 1
        return super().__iter__()


class Unlisted(dict[str, Any]):
    """May only be asked for one member at a time."""

    def items(self) -> NoReturn:
        raise AssertionError("looked through")


def test_a_part_alone_is_found_without_looking_through_all_definitions() -> None:
    part = part_alone({"$ref": "#/$defs/b"}, {"$defs": Unlisted(a={}, b={"type": "null"})})
    assert part == {"$ref": "#/$defs/b", "$defs": {"b": {"type": "null"}}}


def test_a_part_alone_is_looked_through_once_however_often_it_is_referred_to() -> None:
    values = Counted([1])
    names = ["b", "%62", "b/enum", "%62/enum"]
    schema = {"allOf": [{"$ref": f"#/$defs/{name}"} for name in names]}
    assert part_alone(schema, {"$defs": {"b": {"enum": values}}})["$defs"] == {"b": {"enum": values}}
    assert values.num_looks == 1
