"""Random JSON schemas of many keywords, right and wrong, and random answers by their grammars."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from shortfin_apps.llm.components.request.grammar import Bitmask, Grammar
from tests.serving.text.tiny_tokenizers import byte_level_backend

BACKEND = byte_level_backend()
END = BACKEND.get_vocab_size() - 1
NAMES = ["a", "b", "ab"]
TYPES = ["string", "integer", "number", "boolean", "null", "array", "object"]
WRONG_TYPES = ["any", "dict", "float", None, 5, ["string", "any"], []]
PATTERNS = ["^a$", "^a", "b", "^(a|b)$", "^[^ab]+$", ".*", "^(ab)?$"]
WRONG_PATTERNS = ["^(?!x)", r"\bfoo\b", r"a\Z", r"(a)\1", "(", None]
VALUES = [None, True, 0, 3, -1.5, "a", "ab", "", ["a"], {"a": 1}, []]
COUNTS = [0, 1, 2, 2.0, 1 << 40]
WRONG_COUNTS = [None, -1, "2", 0.5]
REFERENCES = ["#", "#/$defs/x", "#/$defs/y", "#/properties/a"]
WRONG_REFERENCES = ["#/$defs/no", "http://x/y", 5]


def _right(schemas: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    """Values of each keyword that JSON schema allows."""
    counts, lists = st.sampled_from(COUNTS), st.lists(schemas, min_size=1, max_size=2)
    numbers = st.sampled_from([-2, 0, 1.5, 3])
    named = st.dictionaries(st.sampled_from(NAMES), schemas, max_size=3)
    return {
        "type": st.sampled_from([*TYPES, ["string", "null"], ["object", "integer"]]),
        "enum": st.lists(st.sampled_from(VALUES), min_size=1, max_size=3),
        "const": st.sampled_from(VALUES),
        "properties": named,
        "required": st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
        "additionalProperties": st.one_of(st.booleans(), schemas),
        "patternProperties": st.dictionaries(st.sampled_from(PATTERNS), schemas, max_size=2),
        "items": schemas,
        "prefixItems": lists,
        "pattern": st.sampled_from(PATTERNS),
        "format": st.sampled_from(["date", "uuid", "path", "color"]),
        "multipleOf": st.sampled_from([2, 0.5]),
        "$ref": st.sampled_from(REFERENCES),
        **dict.fromkeys(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"], numbers),
        **dict.fromkeys(["allOf", "anyOf", "oneOf"], lists),
        **dict.fromkeys(["minLength", "maxLength", "minItems", "maxItems"], counts),
        **dict.fromkeys(["minProperties", "maxProperties"], counts),
        "uniqueItems": st.booleans(),
        "propertyNames": st.sampled_from([True, {}, {"type": "string"}, {"maxLength": 1}]),
        "dependentRequired": st.sampled_from([{}, {"a": []}, {"a": ["b"]}]),
        "not": st.sampled_from([False, {}, {"type": "null"}]),
        "if": schemas,
        "then": schemas,
        "contains": schemas,
        "minContains": counts,
        "unevaluatedProperties": st.booleans(),
        "$schema": st.sampled_from(["http://json-schema.org/draft-07/schema#", "http://x/y", "draft"]),
        "title": st.just("a"),
        "default": st.sampled_from(VALUES),
        "x-more": st.sampled_from(VALUES),
    }


def _wrong() -> dict[str, st.SearchStrategy[Any]]:
    """Values that it does not, or that a grammar cannot keep."""
    nothing = st.sampled_from([None, 5, "a"])
    counts = ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"]
    nested = [
        "properties",
        "additionalProperties",
        "patternProperties",
        "items",
        "prefixItems",
        "allOf",
        "anyOf",
    ]
    return {
        "type": st.sampled_from(WRONG_TYPES),
        "enum": st.sampled_from([None, [], "a"]),
        "required": st.sampled_from([None, True, [1], ["c"]]),
        "pattern": st.sampled_from(WRONG_PATTERNS),
        "$ref": st.sampled_from(WRONG_REFERENCES),
        "minimum": st.sampled_from([None, "1", float("inf"), 1e30]),
        "multipleOf": st.sampled_from([0, None, 1e30]),
        "format": nothing,
        **dict.fromkeys(counts, st.sampled_from(WRONG_COUNTS)),
        **dict.fromkeys(nested, nothing),
    }


@st.composite
def _objects(draw: st.DrawFn, schemas: st.SearchStrategy[Any], wrong: bool) -> dict[str, Any]:
    right = _right(schemas)
    keywords = draw(st.lists(st.sampled_from(sorted(right)), max_size=4, unique=True))
    schema = {keyword: draw(right[keyword]) for keyword in keywords}
    if wrong and draw(st.booleans()):
        keyword = draw(st.sampled_from(sorted(_wrong())))
        schema[keyword] = draw(_wrong()[keyword])
    return schema


@st.composite
def schemas(draw: st.DrawFn, *, wrong: bool = False) -> dict[str, Any]:
    """With two definitions that references may name."""
    some = st.recursive(
        st.one_of(st.booleans(), st.sampled_from([{"type": name} for name in TYPES])),
        lambda inner: _objects(inner, wrong),
        max_leaves=6,
    )
    root = draw(_objects(some, wrong))
    return {**root, "$defs": {"x": draw(some), "y": draw(some)}}


def token_ids_of(bitmask: Bitmask) -> list[int]:
    bits = np.unpackbits(np.frombuffer(bitmask, np.uint8), bitorder="little")
    return [int(token_id) for token_id in np.flatnonzero(bits)]


def walked(grammar: Grammar, rng: random.Random, most: int = 120) -> str | None:
    """The text of an answer by the grammar; None if it is not finished after `most` tokens.

    Tokens that end a part of it are preferred. Raises whatever the grammar does.
    """
    matcher, generated = grammar.matcher(), list[int]()
    while len(generated) < most:
        allowed = token_ids_of(matcher.allowed(generated))
        assert allowed, "no token may follow"
        if allowed == [END] or (END in allowed and rng.random() < 0.5):
            return BACKEND.decode(generated, skip_special_tokens=False)
        generated.append(_chosen([token_id for token_id in allowed if token_id != END], rng))
    return None


def _chosen(token_ids: Sequence[int], rng: random.Random) -> int:
    preferred = [token_id for token_id in token_ids if BACKEND.id_to_token(token_id) in _PREFERRED]
    return rng.choice(preferred if preferred and rng.random() < 0.9 else token_ids)


_PREFERRED = frozenset('"}],:{[ab0123-')


@st.composite
def patterned_objects(draw: st.DrawFn) -> dict[str, Any]:
    """Objects with few names left for further properties, some in two parts."""
    part = _patterned_part()
    return draw(st.one_of(part, part, st.builds(lambda one, other: {"allOf": [one, other]}, part, part)))


def _patterned_part() -> st.SearchStrategy[dict[str, Any]]:
    values = st.sampled_from([{"type": "integer"}, {"type": "integer", "maximum": 5}, True])
    patterns = st.sampled_from(["^a$", "^(a|b)$", "^(a|b|ab)$", *PATTERNS])
    return st.fixed_dictionaries(
        {
            "type": st.just("object"),
            "properties": st.dictionaries(st.sampled_from(NAMES), values, min_size=1),
            "required": st.lists(st.sampled_from(NAMES), max_size=1),
            "patternProperties": st.dictionaries(patterns, values, max_size=1),
            "additionalProperties": st.sampled_from([False, False, False, {"type": "integer"}]),
        }
    )
