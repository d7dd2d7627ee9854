"""Reads the constraints on an answer's format from fields of OpenAI, vLLM, SGLang and llama.cpp.

response_format      {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": ...}}
structured_outputs   {"json" | "regex" | "choice" | "grammar" | "json_object": ...} (vLLM), and its older
                     names guided_json, guided_regex, guided_choice, guided_grammar
json_schema, regex, ebnf, grammar   (SGLang, llama.cpp)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from shortfin_apps.llm.components.grammar.compiler import MAX_CHARS, check_size
from shortfin_apps.llm.components.grammar.source import (
    ANY_OBJECT,
    GrammarKind,
    GrammarSource,
    choice_source,
    schema_source,
)
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.api.schema import SamplingFields, StructuredOutputs

Named = tuple[str, GrammarSource]  # a grammar with the field that holds it


class AskedGrammar(NamedTuple):
    """A grammar to compile: the first of `sources` that is not refused. `param` is the field for errors.

    A source is made when it is tried, as writing one may take long.
    """

    param: str
    sources: Sequence[Callable[[], GrammarSource]]


def asked_grammar(body: SamplingFields, prefix: str = "") -> AskedGrammar | None:
    """Return the grammar that the body gives; see `named_source`."""
    if (named := named_source(body, prefix)) is None:
        return None
    param, source = named
    return AskedGrammar(param, [lambda: source])


def named_source(body: SamplingFields, prefix: str = "") -> Named | None:
    """Return the grammar before compilation.

    Raises InvalidRequestError for an invalid or too long grammar, and for more than one.
    """
    found = list(_sources(body, prefix))
    if len(found) > 1:
        raise InvalidRequestError(f"`{found[0][0]}` and `{found[1][0]}`: give one of them", found[1][0])
    if not found:
        return None
    param, source = found[0]
    check_size(source, param)
    return found[0]


def _sources(body: SamplingFields, prefix: str) -> Iterator[Named]:
    if body.response_format is not None:
        yield from _of_response_format(body.response_format, prefix + "response_format")
    if body.structured_outputs is not None:
        yield from _of_structured_outputs(body.structured_outputs, prefix + "structured_outputs")
    for name, make in _FIELDS.items():
        if (value := getattr(body, name)) not in (None, ""):
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
    """Convert a schema. A long one is refused before the slow step of writing it as a source."""
    if isinstance(schema, dict):
        check_size(schema_source(orjson.dumps(schema).decode()), param)
    return schema_source(schema, is_compact=is_compact)


def _of_structured_outputs(given: StructuredOutputs, param: str) -> Iterator[Named]:
    is_compact = bool(given.disable_any_whitespace)
    if given.json_value is not None:
        source = _schema_or_text(given.json_value, f"{param}.json", is_compact=is_compact)
        yield f"{param}.json", source
    if given.json_object:
        yield f"{param}.json_object", schema_source({"type": "object"}, is_compact=is_compact)
    if given.regex is not None:
        yield f"{param}.regex", _regex(given.regex, f"{param}.regex")
    if given.choice is not None:
        yield f"{param}.choice", _choice(given.choice, f"{param}.choice")
    if given.grammar is not None:
        yield f"{param}.grammar", _ebnf(given.grammar, f"{param}.grammar")


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


_FIELDS: Mapping[str, Callable[[Any, str], GrammarSource]] = {
    "guided_json": _schema_or_text,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _ebnf,
    "json_schema": _schema_or_text,
    "regex": _regex,
    "ebnf": _ebnf,
    "grammar": _ebnf,
}
