"""Rewrites the JSON schemas in a grammar's source: a full schema, or schemas in a Lark grammar's rules."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shortfin_apps.llm.components.grammar.json_schema import Check, Schema, SchemaError, equivalent, mapped
from shortfin_apps.llm.components.grammar.relaxed_schema import first_fault, relaxed
from shortfin_apps.llm.components.grammar.source import GrammarKind, GrammarSource

CheckOf = Callable[[bool], Check]  # takes True to ignore keywords that the library does not know
_RULE = re.compile(r"^(rule_\d+: %json )(\{.*\})$", re.MULTILINE)
# Keys that `Lark.json` adds to a rule's schema: the library's options, and the schema's owner.
_GUIDANCE, _OWNER = "x-guidance", "x-owner"


def with_equivalent_schemas(source: GrammarSource, check_of: CheckOf) -> GrammarSource:
    """Returns the source in the library's form. Raises ValueError for a schema that cannot be enforced."""

    def change(schema: Schema, is_strict: bool) -> Schema:
        try:
            return equivalent(schema, check_of(not is_strict))
        except SchemaError:
            if is_strict:
                raise
            return _without_patterns(schema)

    return _rewritten(source, change)


def with_usable_schemas(source: GrammarSource, check_of: CheckOf) -> GrammarSource:
    """Relaxes the schemas in the source that the library refuses.

    Raises ValueError, with the keyword, for a refused strict schema.
    """

    def change(schema: Schema, is_strict: bool) -> Schema:
        check = check_of(not is_strict)
        reason = check(schema)
        if reason and is_strict:
            raise SchemaError(first_fault(schema, check) or reason)
        return relaxed(schema, check) if reason else schema

    return _rewritten(source, change)


def _without_patterns(schema: Schema) -> Schema:
    """Removes patterns, and `additionalProperties`, which would forbid the names that a pattern allowed."""
    dropped = ("patternProperties", "additionalProperties")
    looser: Schema = mapped(
        schema, lambda node, path: {key: each for key, each in node.items() if key not in dropped}
    )
    return looser


def _rewritten(source: GrammarSource, change: Callable[[Schema, bool], Schema]) -> GrammarSource:
    match source.kind:
        case GrammarKind.JSON_SCHEMA:
            return replace(source, text=_schema_text(source.text, lambda schema: change(schema, True)))
        case GrammarKind.LARK:
            text = _RULE.sub(
                lambda rule: rule[1] + _schema_text(rule[2], lambda schema: _of_rule(schema, change)),
                source.text,
            )
            return replace(source, text=text)
    return source


def _schema_text(text: str, change: Callable[[Schema], Schema]) -> str:
    """Changes a JSON object's text; other text is left as it is, for the library to report."""
    try:
        schema: Any = json.loads(text, parse_constant=str)  # Infinity and NaN are not JSON
    except (ValueError, RecursionError):
        return text
    return json.dumps(change(schema)) if isinstance(schema, dict) else text


def _of_rule(schema: Schema, change: Callable[[Schema, bool], Schema]) -> Schema:
    own = {key: schema.pop(key) for key in (_GUIDANCE, _OWNER)}
    try:
        return {**change(schema, not own[_GUIDANCE]["lenient"]), **own}
    except SchemaError as error:
        raise SchemaError(f"{own[_OWNER]}: {error}" if own[_OWNER] else str(error)) from None
