from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from llguidance import LLTokenizer

from shortfin_apps.llm.components.grammar.compiled import CompiledGrammar, UnusableGrammar, compiled
from shortfin_apps.llm.components.grammar.source import GrammarKind, GrammarSource
from shortfin_apps.llm.serving.dialects.lark import Lark
from tests.components.grammar.random_schemas import BACKEND, END, schemas, walked
from tests.components.grammar.test_compiler import accepts

TOKENIZER = LLTokenizer(BACKEND.to_str(), eos_token=END)
WORD = {"type": "string", "maxLength": 2}


def grammar_of(schema: dict[str, Any], *, strict: bool = False) -> CompiledGrammar:
    lark = Lark({})
    text = lark.source(lark.json(schema, strict=strict, owner="function `f`"))
    return compiled(GrammarSource(GrammarKind.LARK, text), TOKENIZER)


def with_a(schema: object) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema, "b": WORD}, "required": ["a"]}


@settings(max_examples=30, deadline=None)
@given(schemas(wrong=True))
def test_no_schema_is_refused_and_all_are_answered(schema: dict[str, Any]) -> None:
    grammar = grammar_of(schema)
    for seed in range(2):
        if (text := walked(grammar, random.Random(seed))) is not None:
            json.loads(text)


@pytest.fixture
def usual_recursion_limit() -> Iterator[None]:
    """Hypothesis raises it for the whole process."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("usual_recursion_limit")
def test_a_schema_that_nests_too_deeply_is_refused_for_that() -> None:
    text = '{"items":' * 330 + "{}" + "}" * 330
    with pytest.raises(UnusableGrammar, match="it nests too deeply"):
        compiled(GrammarSource(GrammarKind.JSON_SCHEMA, text), TOKENIZER)


LOOKAHEAD = {"type": "string", "pattern": "^(?!x)[a-z]+$", "maxLength": 2}
# What cannot be kept, a value of `a` that must fit, one that need not, and the keyword that strict ones name.
CASES: list[tuple[dict[str, Any], str, str | None, str]] = [
    (LOOKAHEAD, '"ab"', '"abc"', "pattern"),
    ({**WORD, "pattern": r"\bab\b"}, '"ab"', "5", "pattern"),
    ({**WORD, "pattern": r"a\Z"}, '"ab"', "5", "pattern"),
    ({**WORD, "pattern": r"(a)\1"}, '"aa"', "5", "pattern"),
    ({"type": "any"}, "5", None, "type"),
    ({"type": "dict", "properties": {"c": WORD}}, '{"c": "ab"}', '{"c": 5}', "type"),
    ({"type": "float"}, "1.5", '"a"', "type"),
    ({"type": ["string", "any"]}, "5", None, "type"),
    ({"type": None, "maxLength": 2}, '"ab"', '"abc"', "type"),
    ({"type": "object", "required": None}, "{}", "5", "required"),
    ({"type": "string", "enum": None}, '"ab"', "5", "enum"),
    ({"type": "string", "enum": []}, '"ab"', "5", "enum"),
    ({"type": "object", "properties": None}, "{}", "5", "properties"),
    ({"type": "object", "properties": {"c": None, "d": WORD}}, '{"c": 5}', '{"d": 5}', "properties"),
    ({"$ref": "#/$defs/no"}, "5", None, r"\$ref"),
    ({"$ref": "http://x/y"}, "5", None, r"\$ref"),
    ({"type": "array", "items": {"type": "any"}, "maxItems": 1}, "[5]", "[5, 5]", "items.type"),
    ({"type": "array", "items": [5]}, "[5]", '"a"', "items"),
    ({"type": "string", "enum": [1, 2]}, '"ab"', "1", "enum"),
    ({"minimum": 5, "maximum": 4, "type": "integer"}, "7", '"a"', "minimum"),
    ({"type": "integer", "minimum": float("inf")}, "7", '"a"', "minimum"),
    ({"patternProperties": {"(?!x)": WORD}, "additionalProperties": False}, '{"c": 5}', None, "patternP"),
    ({"patternProperties": {"(?!x)": WORD}, "additionalProperties": None}, '{"c": 5}', None, "patternP"),
    ({"patternProperties": {"a": {}, "ab": {}}, "maxProperties": 1}, '{"ab": 5}', None, "patternP"),
    (
        {"type": "object", "properties": {"c": WORD}, "required": ["c", "d"], "additionalProperties": False},
        '{"c": "ab"}',
        '{"d": 1}',
        "required",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "fitting", "other", "keyword"), CASES)
def test_what_cannot_be_kept_is_left_out_and_the_rest_is_kept(
    schema: dict[str, Any], fitting: str, other: str | None, keyword: str
) -> None:
    grammar = grammar_of(with_a(schema))
    assert accepts(grammar, f'{{"a": {fitting}, "b": "ab"}}')
    assert other is None or not accepts(grammar, f'{{"a": {other}, "b": "ab"}}')
    assert not accepts(grammar, f'{{"a": {fitting}, "b": "abc"}}')


@pytest.mark.parametrize(("schema", "fitting", "other", "keyword"), CASES)
def test_a_strict_schema_is_refused_by_owner_place_and_keyword(
    schema: dict[str, Any], fitting: str, other: str | None, keyword: str
) -> None:
    with pytest.raises(UnusableGrammar, match=rf"^function `f`: .*`properties\.a\.{keyword}"):
        grammar_of(with_a(schema), strict=True)


LOOP = {"type": "object", "$ref": "#/$defs/x"}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "object", "$ref": "#"}}, "required": ["a"]},
        {"type": "object", "allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": LOOP}},
        {"type": "object", "allOf": [{"required": ["a"]}, {"properties": {"a": False}}]},
        {"type": "object", "$ref": "#"},
    ],
)  # fmt: skip
def test_a_contradiction_across_references_is_loosened_to_an_object(schema: dict[str, Any]) -> None:
    grammar = grammar_of(schema)
    assert accepts(grammar, '{"a": {}}')
    assert not accepts(grammar, "5")
    with pytest.raises(UnusableGrammar, match="function `f`: `"):
        grammar_of(schema, strict=True)


def test_only_the_property_that_is_refused_is_loosened() -> None:
    schema = {"type": "object", "properties": {"a": LOOP, "b": WORD}, "$defs": {"x": LOOP}}
    grammar = grammar_of(schema)
    assert accepts(grammar, '{"a": 5, "b": "ab"}')
    assert not accepts(grammar, '{"b": "abc"}')


def test_a_definition_that_nothing_refers_to_may_be_wrong() -> None:
    schema = {**with_a(WORD), "$defs": {"x": {"type": "any", "pattern": "(?!x)"}}}
    assert accepts(grammar_of(schema, strict=True), '{"a": "ab"}')


def test_patterns_that_leave_no_name_across_schemas_are_left_out() -> None:
    closed = {"type": "object", "properties": {"c": {}}, "required": ["c"], "additionalProperties": False}
    schema = with_a({"allOf": [closed, {"patternProperties": {"^c$": WORD}}]})
    assert accepts(grammar_of(schema), '{"a": {"c": "abc"}}')
    with pytest.raises(UnusableGrammar, match=r"function `f`: `properties\.a\.patternProperties`"):
        grammar_of(schema, strict=True)


def test_values_of_the_schema_fit_what_it_is_loosened_to() -> None:
    schema = with_a({"anyOf": [{**WORD, "pattern": "^(?=ab)"}, {"type": "integer", "minimum": 3}]})
    jsonschema.validate({"a": "ab"}, schema)
    grammar = grammar_of(schema)
    assert accepts(grammar, '{"a": "ab"}')
    assert accepts(grammar, '{"a": 3}')
    assert not accepts(grammar, '{"a": 2}')
