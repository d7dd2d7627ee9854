from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.dialects.argument_schemas import (
    FORMATS,
    MAX_DEPTH,
    SchemaTypes,
    _alternatives,
    fitting_text,
    part_alone,
    properties_of,
    required_of,
    resolved,
    types_of_value,
)
from shortfin_apps.llm.serving.dialects.lark import Lark
from tests.serving.dialects.matching import lets_through
from tests.serving.dialects.test_lark import compiled, tokenizer_with

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


END = "\n<end>\n"
TEXTS_ROOT = {"$defs": {"short": {"type": "string", "maxLength": 2}, "loop": {"$ref": "#/$defs/loop"}}}
TEXTS_ROOT["$defs"]["many"] = {"allOf": [{"$ref": "#/$defs/many"}] * 9}
TEXTS_ROOT["$defs"] |= {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(MAX_DEPTH - 1)}
TEXTS_ROOT["$defs"][str(MAX_DEPTH - 1)] = {"maxLength": 1}


def nested(depth: int) -> dict[str, Any]:
    """A length inside `allOf` as often as `depth`."""
    return {"allOf": [nested(depth - 1)]} if depth else {"maxLength": 1}


# Of each schema: texts that fit, and others.
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "length": ({"minLength": 1, "maxLength": 3}, ["a", "\nü\n"], ["", "abcd"]),
    "whole floats": ({"minLength": 1.0, "maxLength": 2.0}, ["ab"], ["", "abc"]),
    "no bound": ({"maxLength": 10**20}, ["", "abc"], []),
    "pattern": ({"pattern": r"^[a-z]+/\d$"}, ["ab/1"], ["ab/1x", "xA/1", "ab/"]),
    "pattern anywhere": ({"pattern": "b+"}, ["abc", "b"], ["ac"]),
    "alternatives": ({"pattern": "^(a|c)d|[|]$|e\\$"}, ["cdx", "x|", "xe$x"], ["xad", "|x", "e"]),
    "const": ({"const": 'a"/'}, ['a"/'], ["a", ""]),
    "enum": ({"enum": ["C", "F"]}, ["F"], ["CF", "G"]),
    "not": ({"not": {"enum": ["x", 3]}}, ["", "xx"], ["x"]),
    "not of another type": ({"not": {"type": "integer"}}, ["3"], []),
    "all": ({"allOf": [{"$ref": "#/$defs/short"}, {"pattern": "a"}]}, ["a", "xa"], ["x", "aaa"]),
    "as deep as may be": (nested(MAX_DEPTH), ["a"], ["aa"]),
    "as many references as may be": ({"$ref": "#/$defs/0"}, ["a"], ["aa"]),
    "any": ({"anyOf": [{"const": "a"}, {"minLength": 3}]}, ["a", "bcd"], ["b"]),
    "one": ({"oneOf": [{"maxLength": 3}, {"minLength": 2}]}, ["a", "abcd"], ["ab"]),
    "date": ({"format": "date"}, ["2024-02-29"], ["2024-02-30", "x2024-01-01"]),
    "time": ({"format": "time"}, ["23:59:60.5+01:00"], ["24:00:00Z", "12:00:00"]),
    "date and time": ({"format": "date-time"}, ["2024-12-31T00:00:00Z"], ["2024-12-31"]),
    "duration": ({"format": "duration"}, ["P1Y2M3DT4H", "PT5S", "P6W"], ["P", "1D", "PT"]),
    "email": ({"format": "email"}, ["a.b+c@d.ef"], ["a@", "a..b@c", "a b@c"]),
    "hostname": ({"format": "hostname"}, ["a-b.cd"], ["-a", "a."]),
    "ipv4": ({"format": "ipv4"}, ["255.0.10.99"], ["256.0.0.1", "1.2.3"]),
    "ipv6": ({"format": "ipv6"}, ["::", "::1", "fe80::1:2", "1:2:3:4:5:6:7:8"], ["1:2", "1::2::3"]),
    "uuid": ({"format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
    "uri": ({"format": "uri"}, ["https://a.b/c?d=%20#e", "urn:a"], ["//a", "a:b c"]),
    "an unknown format": ({"format": "path", "maxLength": 9}, ["any"], []),
}


def text_of(schema: Any, root: dict[str, Any] = TEXTS_ROOT, *, strict: bool = True) -> str | None:
    return fitting_text(Lark({}), schema, SchemaTypes(root), strict=strict)


def test_every_format_is_tried() -> None:
    assert FORMATS.keys() <= {schema.get("format") for schema, _, _ in CASES.values()}


@pytest.mark.parametrize(("schema", "fitting", "others"), CASES.values(), ids=CASES)
async def test_texts_fit_the_keywords_of_strict_schemas(
    schema: dict[str, Any], fitting: list[str], others: list[str]
) -> None:
    text = text_of({"type": "string"} | schema)
    tokenizer, lark = tokenizer_with(frozenset(), special=False), Lark({})
    grammar = await compiled(tokenizer, lark.source(lark.through(END, lark.terminal(text or "/(?s:.*)/"))))
    for each in fitting:
        assert lets_through(grammar, tokenizer, each + END), each
    for each in others:
        assert not lets_through(grammar, tokenizer, each + END), each


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"if": {"const": "a"}, "then": False}, "if"),
        ({"pattern": 3}, "pattern"),
        ({"maxLength": None}, "maxLength"),
        ({"minLength": -1}, "minLength"),
        ({"minLength": 3, "maxLength": 2}, "minLength"),
        ({"$ref": "#/$defs/none"}, r"\$ref"),
        ({"$ref": "#/$defs/loop"}, r"\$ref"),
        ({"$ref": "#/$defs/many"}, r"\$ref"),
        ({"anyOf": [{"not": {"else": {}}}]}, "else"),
    ],
)
def test_keywords_that_cannot_be_kept_are_refused_strictly_alone(schema: Any, keyword: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"`{keyword}` of a strict function"):
        text_of(schema)
    assert text_of(schema, strict=False) in (None, "((/(?s:.*)/))")


def test_texts_of_any_kind_need_no_terminal() -> None:
    assert text_of({"type": "string", "description": "any"}) is None
    assert text_of(True) is None


@pytest.mark.parametrize(
    "options",
    [
        [{"$ref": "#/$defs/long"}] * 20,
        [{"const": "b" * 10_000}] * 9,
    ],
)
def test_a_text_is_bounded_before_it_is_multiplied(options: Any) -> None:
    root = {"$defs": {"long": {"const": "a" * 20_000}}}
    with pytest.raises(InvalidRequestError, match="more than 131,072 characters"):
        text_of({"type": "string", "oneOf": options}, root)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "shared",
    [
        {"enum": ["a", *range(9_000)]},
        {"allOf": [{}] * 190 + [False]},
        {"anyOf": [{"$ref": "#/" + "x" * 9_000}, {"const": "a"}]},
    ],
)
def test_what_many_parameters_refer_to_is_read_a_bounded_number_of_times(shared: Any, strict: bool) -> None:
    lark, types = Lark({}), SchemaTypes({"$defs": {"shared": shared}, "x" * 9_000: {}})
    parameter = {"type": "string", "$ref": "#/$defs/shared"}
    with pytest.raises(InvalidRequestError, match="counted as often as it is referred to"):
        [fitting_text(lark, parameter, types, strict=strict) for _ in range(500)]


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [
        ("", [""]),
        ("a|b", ["a", "b"]),
        ("|a|", ["", "a", ""]),
        ("(a|b)|[|]|c\\|d", ["(a|b)", "[|]", "c\\|d"]),
    ],
)
def test_alternatives_are_in_no_group_and_no_class(pattern: str, parts: list[str]) -> None:
    assert _alternatives(pattern) == parts
