"""The grammar that an answer must match, read from a request's fields.

The fields are those of OpenAI, vLLM, SGLang and llama.cpp:

response_format      {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": ...}}
structured_outputs   {"json" | "regex" | "choice" | "grammar" | "json_object": ...} (vLLM), and its older
                     names guided_json, guided_regex, guided_choice, guided_grammar
json_schema, regex, ebnf, grammar   (SGLang, llama.cpp)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import orjson

from shortfin_apps.llm.components.grammar.thought_budget import ThoughtBudget
from shortfin_apps.llm.contract.errors import InvalidRequestError


class GrammarKind(StrEnum):
    """Languages of a grammar source. REGEX is in the syntax of Rust's `regex` crate; EBNF is GBNF or Lark."""

    JSON_SCHEMA = "JSON schema"
    REGEX = "regular expression"
    EBNF = "grammar"
    LARK = "Lark grammar"


MAX_CHARS = {  # bounds the recursion along references between rules, which must fit in STACK_BYTES
    GrammarKind.JSON_SCHEMA: 65_536,
    GrammarKind.REGEX: 16_384,
    GrammarKind.EBNF: 32_768,
    GrammarKind.LARK: 65_536,
}
MAX_RULES = 300  # the time to report an error in a chain of rules grows with the cube of its length


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar before compilation.

    `is_compact`: the JSON output has no white space between its tokens. `budget`: limits the reasoning at
    the beginning of the output, which the grammar must allow to end after any token.
    """

    kind: GrammarKind
    text: str
    is_compact: bool = False
    budget: ThoughtBudget | None = None

    def to_json(self) -> bytes:
        budget = None if self.budget is None else astuple(self.budget)
        return json.dumps([self.kind, self.text, self.is_compact, budget]).encode()

    @classmethod
    def from_json(cls, encoded: bytes) -> GrammarSource:
        kind, text, is_compact, budget = json.loads(encoded)
        if budget is not None:
            max_tokens, begins, ends = budget
            budget = ThoughtBudget(max_tokens, tuple(begins), tuple(ends))
        return cls(GrammarKind(kind), text, is_compact, budget)


def schema_source(schema: dict[str, Any] | str, *, is_compact: bool = False) -> GrammarSource:
    """Return a source for the JSON values that match `schema`, a dictionary or a JSON string."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return GrammarSource(GrammarKind.JSON_SCHEMA, text, is_compact)


def choice_source(choices: Sequence[str]) -> GrammarSource:
    """Return a source that matches any one of `choices`, as a Lark grammar."""
    alternatives = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return GrammarSource(GrammarKind.LARK, f"start: {alternatives}")


ANY_OBJECT = schema_source({"type": "object"})
ANY_TOKENS = GrammarSource(GrammarKind.LARK, "start: <[*]>*")

Named = tuple[str, GrammarSource]  # the name of a request field, and the grammar in that field


class AskedGrammar(NamedTuple):
    """A request for a grammar: the first of `sources` that the compiler does not refuse.

    Each item of `sources` makes a source from the prompt's text, and is called only when its turn comes,
    because making one may take long. `param` is the request field for error messages.
    """

    param: str
    sources: Sequence[Callable[[str], GrammarSource]]


def asked_grammar(fields: Mapping[str, Any], prefix: str = "") -> AskedGrammar | None:
    """Return the grammar in a request's fields, or None if there is none. Raises like `named_source`."""
    if (named := named_source(fields, prefix)) is None:
        return None
    param, source = named
    return AskedGrammar(param, [lambda prompt: source])


def named_source(fields: Mapping[str, Any], prefix: str = "") -> Named | None:
    """Return the grammar source in a request's fields with the field's name, or None if there is none.

    `prefix` precedes the fields' names in the result and in error messages. Raises InvalidRequestError for an
    invalid or oversized grammar, and for several grammars.
    """
    found = list(_sources(fields, prefix))
    if len(found) > 1:
        raise InvalidRequestError(f"`{found[0][0]}` and `{found[1][0]}`: give one of them", found[1][0])
    if not found:
        return None
    param, source = found[0]
    check_size(source, param)
    return found[0]


def _sources(fields: Mapping[str, Any], prefix: str) -> Iterator[Named]:
    for name, read in _NESTED.items():
        if (value := fields.get(name)) is not None:
            yield from read(value, prefix + name)
    for name, make in _PLAIN.items():
        if (value := fields.get(name)) not in (None, ""):
            yield prefix + name, make(value, prefix + name)


def _of_response_format(given: Mapping[str, Any], param: str) -> Iterator[Named]:
    match given.get("type"):
        case "text":
            return
        case "json_object":  # llama.cpp also accepts a schema here
            schema = given.get("schema")
            yield (
                (param, ANY_OBJECT)
                if schema is None
                else (f"{param}.schema", _schema(schema, f"{param}.schema"))
            )
        case "json_schema":
            inner = given.get("json_schema")
            schema = inner.get("schema") if isinstance(inner, dict) else given.get("schema")
            yield f"{param}.json_schema.schema", _schema(schema, f"{param}.json_schema.schema")
        case _:
            rule = "`text`, `json_object` or `json_schema`"
            raise InvalidRequestError(f"`{param}.type` must be {rule}", f"{param}.type")


def _schema(schema: object, param: str) -> GrammarSource:
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"`{param}` must be a JSON schema, an object", param)
    return _schema_or_text(schema, param)


def _schema_or_text(schema: dict[str, Any] | str, param: str, *, is_compact: bool = False) -> GrammarSource:
    """Convert a schema to a source. Raises InvalidRequestError for an oversized dictionary.

    The size is checked on a fast serialisation; the source itself is written by the slower `json` module.
    """
    if isinstance(schema, dict):
        check_size(schema_source(orjson.dumps(schema).decode()), param)
    return schema_source(schema, is_compact=is_compact)


def _of_structured_outputs(given: Mapping[str, Any], param: str) -> Iterator[Named]:
    is_compact = bool(given.get("disable_any_whitespace"))
    if given.get("json") is not None:
        source = _schema_or_text(given["json"], f"{param}.json", is_compact=is_compact)
        yield f"{param}.json", source
    if given.get("json_object"):
        yield f"{param}.json_object", schema_source({"type": "object"}, is_compact=is_compact)
    for name, make in _STRUCTURED.items():
        if (value := given.get(name)) is not None:
            yield f"{param}.{name}", make(value, f"{param}.{name}")


def _choice(choices: list[str], param: str) -> GrammarSource:
    if not choices:
        raise InvalidRequestError(f"`{param}` must hold at least one text", param)
    limit = MAX_CHARS[GrammarKind.LARK]
    if sum(map(len, choices)) + len(choices) > limit:  # checked before quoting, which is slow for millions
        raise InvalidRequestError(
            f"`{param}`: the texts may have at most {limit:,} characters together, with one more for each",
            param,
        )
    return choice_source(choices)


def _regex(text: str, param: str) -> GrammarSource:
    return GrammarSource(GrammarKind.REGEX, text)


def _ebnf(text: str, param: str) -> GrammarSource:
    return GrammarSource(GrammarKind.EBNF, text)


_NESTED: Mapping[str, Callable[[Any, str], Iterator[Named]]] = {
    "response_format": _of_response_format,
    "structured_outputs": _of_structured_outputs,
}
_STRUCTURED: Mapping[str, Callable[[Any, str], GrammarSource]] = {
    "regex": _regex,
    "choice": _choice,
    "grammar": _ebnf,
}
_PLAIN: Mapping[str, Callable[[Any, str], GrammarSource]] = {
    "guided_json": _schema_or_text,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _ebnf,
    "json_schema": _schema_or_text,
    "regex": _regex,
    "ebnf": _ebnf,
    "grammar": _ebnf,
}

FIELDS = frozenset({*_NESTED, *_PLAIN})


def check_size(source: GrammarSource, param: str) -> None:
    """Raise InvalidRequestError for a source with too many characters or rules."""
    limit = MAX_CHARS[source.kind]
    if len(source.text) > limit:
        raise InvalidRequestError(f"`{param}`: a {source.kind} may have at most {limit:,} characters", param)
    if source.kind is GrammarKind.EBNF and len(re.findall("::=|:", source.text)) > MAX_RULES:
        raise InvalidRequestError(f"`{param}`: a {source.kind} may have at most {MAX_RULES} rules", param)
