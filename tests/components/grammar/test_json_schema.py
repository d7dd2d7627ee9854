from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from referencing.exceptions import Unresolvable

from shortfin_apps.llm.components.grammar.compiled import CompiledGrammar, UnusableGrammar, compiled
from shortfin_apps.llm.components.grammar.json_schema import FORMATS, equivalent, pointed
from shortfin_apps.llm.components.grammar.source import schema_source
from tests.components.grammar.random_schemas import BACKEND, END, patterned_objects, schemas, walked
from tests.components.grammar.test_compiler import accepts

TOKENIZER = LLTokenizer(BACKEND.to_str(), eos_token=END)
INTEGER = {"type": "integer"}
NAMED_KEYWORD = re.compile(r"`[^`]*[a-zA-Z]`")
AGE = {"type": "object", "properties": {"age": INTEGER}, "required": ["age"], "additionalProperties": False}


def grammar_of(schema: dict[str, Any]) -> CompiledGrammar:
    return compiled(schema_source(schema), TOKENIZER)


def usable(schema: dict[str, Any]) -> CompiledGrammar | str:
    """The grammar, or why there is none."""
    try:
        return grammar_of(schema)
    except UnusableGrammar as refused:
        return str(refused)


def is_valid(schema: dict[str, Any], value: Any) -> bool:
    try:
        draft = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        return bool(draft(schema).is_valid(value))
    except (Unresolvable, RecursionError):  # a schema that jsonschema does not take
        return True


@settings(max_examples=30, deadline=None)
@given(schemas(), st.integers(0, 1000))
def test_a_schema_is_refused_or_its_answers_are_finished_and_fit(schema: dict[str, Any], seed: int) -> None:
    match usable(schema):
        case str(reason):
            assert NAMED_KEYWORD.search(reason)
        case grammar:
            texts = [walked(grammar, random.Random(seed + turn)) for turn in range(2)]
            assert all(text is None or is_valid(schema, json.loads(text)) for text in texts), texts


@settings(max_examples=20, deadline=None)
@given(schemas(wrong=True))
def test_a_schema_that_is_wrong_is_refused_with_a_reason_or_answered(schema: dict[str, Any]) -> None:
    match usable(schema):
        case str(reason):
            assert NAMED_KEYWORD.search(reason)
        case grammar:
            walked(grammar, random.Random(0))


@settings(max_examples=40, deadline=None)
@given(patterned_objects(), st.integers(0, 1000))
def test_an_object_with_patterns_can_be_finished_after_any_of_its_properties(
    schema: dict[str, Any], seed: int
) -> None:
    if isinstance(grammar := usable(schema), CompiledGrammar):
        text = walked(grammar, random.Random(seed))
        assert text is None or is_valid(schema, json.loads(text))


@pytest.mark.parametrize(
    "keywords",
    [
        {"propertyNames": {"type": "string"}},
        {"propertyNames": {"type": ["string", "null"], "description": "a key"}},
        {"uniqueItems": False},
        {"uniqueItems": True, "maxItems": 1},
        {"dependentRequired": {}, "dependentSchemas": {"a": True}, "dependencies": {"a": []}},
        {"format": "path"},
        {"not": False},
        {"if": {"type": "string"}},
        {"then": {"type": "string"}, "else": False},
        {"contains": {"type": "string"}, "minContains": 0},
        {"maxContains": 0},
        {"unevaluatedProperties": False, "additionalProperties": False},
        {"unevaluatedItems": False, "items": {"type": "null"}},
        {"$schema": "http://json-schema.org/schema#"},
        {"$dynamicAnchor": "here"},
        {"x-guidance": {"unknown": 1}},
        {"maxLength": 1e30, "minLength": 2.0},
    ],
    ids=str,
)
def test_keywords_without_effect_are_taken(keywords: dict[str, Any]) -> None:
    assert accepts(grammar_of({"type": ["string", "object"], "maxProperties": 1, **keywords}), '"abc"')


@pytest.mark.parametrize(
    "keywords",
    [
        {"propertyNames": {"type": "string", "maxLength": 2}},
        {"uniqueItems": True},
        {"dependentRequired": {"a": ["b"]}},
        {"not": {"type": "string"}},
        {"if": {"type": "string"}, "else": {"type": "null"}},
        {"contains": {"type": "string"}},
        {"unevaluatedProperties": False},
    ],
    ids=str,
)
def test_keywords_with_an_effect_that_cannot_be_kept_are_refused_by_name(keywords: dict[str, Any]) -> None:
    with pytest.raises(UnusableGrammar, match=f"properties.a.{next(iter(keywords))}"):
        grammar_of({"type": "object", "properties": {"a": keywords}})


def test_the_formats_that_are_kept_are_those_of_the_library() -> None:
    for name in [*FORMATS, "path", "color", "regex", "iri", "json-pointer", "uri-reference", "idn-email"]:
        schema = json.dumps({"type": "string", "format": name})
        problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
        assert ("Unknown format" not in problem) is (name in FORMATS)


@pytest.mark.parametrize(
    ("schema", "fitting", "others"),
    [
        (
            {**AGE, "patternProperties": {"^age$": {"maximum": 9}}},
            ['{"age": 5}'],
            ['{"age": 10', '{"age": 5,', "{}"],
        ),
        (
            {**AGE, "required": ["b"], "patternProperties": {"^(age|b)$": {"maximum": 9}}},
            ['{"age": 5, "b": 1}', '{"b": 1}'],
            ['{"age": 10', '{"b": 1,'],
        ),
        ({**AGE, "patternProperties": {r"[^\s\S]": {}}}, ['{"age": 5}'], ['{"age": 5,']),
        (
            {**AGE, "patternProperties": {"^a": {"maximum": 9}}},
            ['{"age": 5, "a": 1}'],
            ['{"age": 10', '{"age": 5, "b'],
        ),
        (
            {"type": "object", "properties": {"age": INTEGER}, "patternProperties": {"": INTEGER}},
            ['{"b": 1}'],
            ['{"b": "'],
        ),
    ],
)  # fmt: skip
def test_an_object_is_closed_where_its_patterns_leave_no_further_name(
    schema: dict[str, Any], fitting: list[str], others: list[str]
) -> None:
    grammar = grammar_of(schema)
    assert all(accepts(grammar, text) for text in fitting)
    assert not any(accepts(grammar, text) for text in others)
    for seed in range(5):
        text = walked(grammar, random.Random(seed))
        assert text is None or is_valid(schema, json.loads(text))


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [AGE, {"type": "object", "patternProperties": {"^age$": {"maximum": 9}}}]},
        {
            "$ref": "#/$defs/x",
            "additionalProperties": False,
            "$defs": {"x": {"patternProperties": {"^a$": {}}}},
        },
        {**AGE, "anyOf": [{"required": ["b"]}, {"patternProperties": {"^age$": {}}}]},
    ],
)
def test_patterns_that_leave_no_name_across_schemas_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(UnusableGrammar, match=r"`properties\.in\.patternProperties` leaves no name"):
        grammar_of({"$defs": schema.get("$defs", {}), "type": "object", "properties": {"in": schema}})


def test_patterns_that_leave_names_across_schemas_are_kept() -> None:
    closed = {"patternProperties": {"^b": INTEGER}, "additionalProperties": False}
    grammar = grammar_of({"allOf": [{"type": "object", "properties": {"b": INTEGER}}, closed]})
    assert accepts(grammar, '{"b": 1, "bb": 2}')
    assert not accepts(grammar, '{"b": 1, "c": 2}')


def test_patterns_that_overlap_across_schemas_are_refused_for_that() -> None:
    parts = [{"type": "object", "patternProperties": {pattern: {}}} for pattern in ("^a", "a")]
    with pytest.raises(UnusableGrammar, match="not disjoint"):
        grammar_of({"allOf": parts, "required": ["a"]})


def test_choices_in_choices_are_not_multiplied_out() -> None:
    """40 definitions that each have the next one twice, with patterns at the end."""
    definitions = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    last = {"type": "object", "patternProperties": {"^a$": INTEGER}}
    checks: list[object] = []
    schema = {"$ref": "#/$defs/d0", "$defs": {**definitions, "d40": last}}

    def check(asked: dict[str, Any]) -> str:
        checks.append(asked)
        return ""

    assert equivalent(schema, check) == schema
    assert len(checks) == 2


def test_references_are_json_pointers() -> None:
    root = {"$defs": {"a/b": [{"~": 1}]}}
    assert pointed(root, "#") == root
    assert pointed(root, "#/$defs/a~1b/0/~0") == 1
    for other in ("#/$defs/c", "#/$defs/a~1b/1", "#/$defs/a~1b/0/~0/x", "x.json#/$defs"):
        assert pointed(root, other) is None
