from __future__ import annotations

import asyncio
import threading

import pytest

from shortfin_apps.llm.components.grammar import compiler
from shortfin_apps.llm.components.grammar.compiled import CompiledGrammar
from shortfin_apps.llm.components.grammar.compiler import GrammarCompiler
from shortfin_apps.llm.components.grammar.source import (
    GrammarKind,
    GrammarSource,
    choice_source,
    schema_source,
)
from shortfin_apps.llm.errors import InvalidRequestError, OverloadedError
from tests.components.text.tiny_tokenizers import byte_level_backend

BACKEND = byte_level_backend()
END = BACKEND.get_vocab_size() - 1


def regex(text: str) -> GrammarSource:
    return GrammarSource(GrammarKind.REGEX, text)


@pytest.fixture
def grammars() -> GrammarCompiler:
    return GrammarCompiler(BACKEND.to_str, {END})


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    """Whether the tokens of `text`, and then the end, are allowed one after the other."""
    matcher, token_ids = grammar.matcher(), [*BACKEND.encode(text).ids, END]
    for index, token_id in enumerate(token_ids):
        if not matcher.allowed(token_ids[:index])[token_id // 8] >> token_id % 8 & 1:
            return False
    return True


@pytest.mark.parametrize(
    ("source", "fitting", "others"),
    [
        (regex("a+b?"), ["a", "aab"], ["", "b", "abb"]),
        (choice_source(['a"b', "\\", "\n", "ü"]), ['a"b', "\\", "\n", "ü"], ["a", "u"]),
        (GrammarSource(GrammarKind.EBNF, 'root ::= "the" [0-9]'), ["the1"], ["the", "the12"]),
        (GrammarSource(GrammarKind.EBNF, 'start: "the" /[0-9]/'), ["the1"], ["the", "the12"]),
        (schema_source({"const": {"a": 1}}), ['{"a": 1}', '{\n  "a":1}'], ["{}", '{"a":' + " " * 33 + "1}"]),
        (schema_source('{"const": {"a": 1}}', is_compact=True), ['{"a":1}'], ['{"a": 1}']),
    ],
)
async def test_what_is_allowed(
    grammars: GrammarCompiler, source: GrammarSource, fitting: list[str], others: list[str]
) -> None:
    grammar = await grammars.compile(source, "f")
    assert [text for text in [*fitting, *others] if accepts(grammar, text)] == fitting


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (regex("(a"), "unclosed group"),
        (regex(r"[^\s\S]"), "nothing matches it"),
        (regex("a" * 16_385), "at most 16,384 characters"),
        (regex("a{100000}"), "too many expressions"),
        (schema_source({"not": {}}), "not"),
        (schema_source({"not": {}, "x-guidance": {"lenient": True}}), "not"),
        (schema_source({"type": "string", "minLength": 2, "maxLength": 1}), "Unsatisfiable"),
        (
            GrammarSource(GrammarKind.EBNF, "\n".join(f"r{i}: r{i + 1}" for i in range(301))),
            "at most 300 rules",
        ),
        (schema_source("{"), "EOF"),
        (schema_source("true"), "object"),
        (GrammarSource(GrammarKind.EBNF, "hello"), "Expected ::="),
    ],
    ids=str,
)
async def test_what_cannot_be_used_is_refused_with_the_reason(
    grammars: GrammarCompiler, source: GrammarSource, reason: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await grammars.compile(source, "field")
    assert caught.value.param == "field"
    assert str(caught.value).startswith("`field`")
    assert reason.lower() in str(caught.value).lower()


async def test_a_chain_of_references_does_not_exhaust_the_stack(grammars: GrammarCompiler) -> None:
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1_500)}
    schema = {"$defs": {**links, "d1500": {"type": "null"}}, "$ref": "#/$defs/d0"}
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(250))
    chains = [schema_source(schema), GrammarSource(GrammarKind.EBNF, f'start: r0\n{rules}\nr250: "a"')]
    value, letter = [await grammars.compile(chain, "f") for chain in chains]
    assert accepts(value, "null")
    assert accepts(letter, "a")


async def test_a_grammar_is_compiled_once_while_it_is_kept(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "MAX_KEPT", 2)
    first = await grammars.compile(regex("a"), "f")
    await grammars.compile(regex("b"), "f")
    assert await grammars.compile(regex("a"), "g") is first
    await grammars.compile(regex("c"), "f")
    assert await grammars.compile(regex("a"), "f") is first, "the last that was asked for"
    await grammars.compile(regex("b"), "f")
    await grammars.compile(regex("c"), "f")
    assert await grammars.compile(regex("a"), "f") is not first


async def test_what_takes_long_is_refused(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind it another request's grammar gets no turn, which is not that request's fault."""
    go_on = threading.Event()
    monkeypatch.setattr(grammars, "_compile", lambda source, param: go_on.wait())
    monkeypatch.setattr(compiler, "TIMEOUT_S", 0.05)
    try:
        slow, waiting = await asyncio.gather(
            *(grammars.compile(regex(text), "f") for text in "ab"), return_exceptions=True
        )
    finally:
        go_on.set()
    assert isinstance(slow, InvalidRequestError)
    assert isinstance(waiting, OverloadedError)


@pytest.mark.parametrize(
    ("tokenizer_json", "ends", "reason"),
    [("{}", {0}, "tokenizer"), (BACKEND.to_str(), set(), "end-of-sequence")],
)
async def test_a_model_without_grammars_says_so(tokenizer_json: str, ends: set[int], reason: str) -> None:
    grammars = GrammarCompiler(lambda: tokenizer_json, ends)
    grammars.prepare()
    with pytest.raises(InvalidRequestError, match=reason):
        await grammars.compile(regex("a"), "f")
