from __future__ import annotations

from typing import Any

import pytest

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.dialects.json_types import MAX_DEPTH, SchemaTypes
from shortfin_apps.llm.serving.dialects.lark import Lark
from shortfin_apps.llm.serving.dialects.raw_text import FORMATS, _alternatives, fitting_text
from tests.serving.dialects.matching import lets_through
from tests.serving.dialects.test_lark import compiled, tokenizer_with

END = "\n<end>\n"
ROOT = {"$defs": {"short": {"type": "string", "maxLength": 2}, "loop": {"$ref": "#/$defs/loop"}}}
ROOT["$defs"]["many"] = {"allOf": [{"$ref": "#/$defs/many"}] * 9}
ROOT["$defs"] |= {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(MAX_DEPTH - 1)}
ROOT["$defs"][str(MAX_DEPTH - 1)] = {"maxLength": 1}


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


def text_of(schema: Any, root: dict[str, Any] = ROOT, *, strict: bool = True) -> str | None:
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
