"""Rewrites the JSON schemas in a grammar source: a whole JSON schema, or schemas in a Lark grammar's rules.

A rule's schema is strict unless its library option `lenient` is set; a whole JSON schema is always strict.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shortfin_apps.llm.components.grammar.json_schema import Check, Schema, SchemaError, equivalent, mapped
from shortfin_apps.llm.components.grammar.relaxed_schema import first_fault, relaxed
from shortfin_apps.llm.components.grammar.source import GrammarKind, GrammarSource

CheckOf = Callable[[bool], Check]  # argument: whether to ignore keywords that the library does not know
_RULE = re.compile(r"^(rule_\d+: %json )(\{.*\})$", re.MULTILINE)
# Keys that `Lark.json` adds to a rule's schema: the library's options, and the owner for error messages.
_GUIDANCE, _OWNER = "x-guidance", "x-owner"


def with_equivalent_schemas(source: GrammarSource, check_of: CheckOf) -> GrammarSource:
    """Rewrite each schema to an equivalent one that the library can enforce.

    If there is none, a strict schema raises ValueError, and a non-strict schema loses its patterns.
    """

    def change(schema: Schema, is_strict: bool) -> Schema:
        try:
            return equivalent(schema, check_of(not is_strict))
        except SchemaError:
            if is_strict:
                raise
            return _without_patterns(schema)

    return _rewritten(source, change)


def with_usable_schemas(source: GrammarSource, check_of: CheckOf) -> GrammarSource:
    """Relax the non-strict schemas that the library refuses.

    Raises ValueError, naming the keyword, if the library refuses a strict schema.
    """

    def change(schema: Schema, is_strict: bool) -> Schema:
        check = check_of(not is_strict)
        reason = check(schema)
        if reason and is_strict:
            raise SchemaError(first_fault(schema, check) or reason)
        return relaxed(schema, check) if reason else schema

    return _rewritten(source, change)


def _without_patterns(schema: Schema) -> Schema:
    """Remove `patternProperties` and `additionalProperties`.

    Without the patterns, `additionalProperties` would forbid the property names that a pattern allowed.
    """
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
    """Apply `change` to a JSON object, given as a string.

    Returns any other string unchanged; the library will report the error.
    """
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
