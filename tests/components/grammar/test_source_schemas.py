from __future__ import annotations

import json

import pytest

from shortfin_apps.llm.components.grammar.json_schema import Check, Schema
from shortfin_apps.llm.components.grammar.source import (
    GrammarKind,
    GrammarSource,
    choice_source,
    schema_source,
)
from shortfin_apps.llm.components.grammar.source_schemas import with_equivalent_schemas, with_usable_schemas
from shortfin_apps.llm.serving.dialects.lark import Lark

PLAIN = {"type": "string", "uniqueItems": False}


def refusing_patterns(lenient: bool) -> Check:
    def check(schema: Schema) -> str:
        return "no patterns" if "pattern" in json.dumps(schema) else ""

    return check


def test_schemas_of_rules_are_rewritten_and_keep_the_librarys_options() -> None:
    lark = Lark({})
    source = GrammarSource(GrammarKind.LARK, lark.source(lark.json({**PLAIN, "title": "\n"}, strict=True)))
    changed = with_equivalent_schemas(source, refusing_patterns)
    before, after = (json.loads(each.text.partition("%json ")[2]) for each in (source, changed))
    assert after == {key: value for key, value in before.items() if key != "uniqueItems"}
    assert not after["x-guidance"]["lenient"]


@pytest.mark.parametrize(
    "source",
    [
        choice_source(["rule_0: %json {}", "\nrule_0: %json {}\n"]),
        GrammarSource(GrammarKind.REGEX, json.dumps(PLAIN)),
        GrammarSource(GrammarKind.EBNF, f"start: %json {json.dumps(PLAIN)}"),
        schema_source("{"),
        schema_source("true"),
        schema_source("[" * 100_000),
    ],
)
def test_other_texts_are_left_as_they_are(source: GrammarSource) -> None:
    assert with_equivalent_schemas(source, refusing_patterns) == source
    assert with_usable_schemas(source, refusing_patterns) == source


def test_only_schemas_that_are_refused_are_loosened() -> None:
    lark = Lark({})
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "a"}}}
    rules = [lark.json(schema, strict=strict) for schema, strict in ((PLAIN, True), (bad, False))]
    source = GrammarSource(GrammarKind.LARK, lark.source(" ".join(rules)))
    first, second = with_usable_schemas(source, refusing_patterns).text.splitlines()[1:]
    assert first == source.text.splitlines()[1]
    assert json.loads(second.partition("%json ")[2])["properties"] == {"a": {"type": "string"}}
