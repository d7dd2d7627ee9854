from __future__ import annotations

import asyncio
import threading

import pytest

from shortfin_apps.llm.components.grammar import compiler, trials
from shortfin_apps.llm.components.grammar.compiled import CompiledGrammar
from shortfin_apps.llm.components.grammar.compiler import GrammarCompiler
from shortfin_apps.llm.components.grammar.source import (
    GrammarKind,
    GrammarSource,
    choice_source,
    schema_source,
)
from shortfin_apps.llm.components.grammar.trial_process import TrialLimits
from shortfin_apps.llm.errors import InvalidRequestError, OverloadedError
from tests.components.grammar.hostile import NEVER_COMPILED, UNLIMITED
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


async def test_advice_is_on_what_a_request_can_change(grammars: GrammarCompiler) -> None:
    schema = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    with pytest.raises(InvalidRequestError, match=r"oneOf constraints are not supported.*`anyOf`") as refused:
        await grammars.compile(schema_source(schema), "f")
    assert "coerce" not in str(refused.value)


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
    again = await grammars.compile(regex("a"), "g")
    assert again == first
    assert (first.param, again.param) == ("f", "g")
    await grammars.compile(regex("c"), "f")
    assert await grammars.compile(regex("a"), "f") == first, "the last that was asked for"
    await grammars.compile(regex("b"), "f")
    await grammars.compile(regex("c"), "f")
    assert await grammars.compile(regex("a"), "f") != first


async def test_what_takes_too_much_is_refused_by_its_field() -> None:
    grammars = GrammarCompiler(BACKEND.to_str, {END}, TrialLimits(cpu_s=0.1))
    with pytest.raises(InvalidRequestError, match=r"`f`.* 0\.1 s of a processor") as caught:
        await grammars.compile(NEVER_COMPILED, "f")
    assert caught.value.param == "f"


async def test_others_compile_beside_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "TIMEOUT_S", 1e3)
    grammars = GrammarCompiler(BACKEND.to_str, {END}, UNLIMITED)
    slow = asyncio.create_task(grammars.compile(NEVER_COMPILED, "f"))
    for text in "abc":
        assert accepts(await grammars.compile(regex(text), "f"), text)
    assert not slow.done()
    slow.cancel()


async def test_what_waits_for_others_is_told_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "MAX_AT_ONCE", 1)
    grammars = GrammarCompiler(BACKEND.to_str, {END}, UNLIMITED)
    await grammars.compile(regex("a"), "f")
    monkeypatch.setattr(compiler, "TIMEOUT_S", 1e3)
    slow = asyncio.create_task(grammars.compile(NEVER_COMPILED, "f"))
    await asyncio.sleep(0)  # it gets the only place
    monkeypatch.setattr(compiler, "TIMEOUT_S", 0.05)
    with pytest.raises(OverloadedError):
        await grammars.compile(regex("b"), "f")
    slow.cancel()


async def test_a_process_that_was_killed_is_started_again(grammars: GrammarCompiler) -> None:
    await grammars.compile(regex("a"), "f")
    assert grammars._trials is not None
    grammars._trials.process.kill()
    grammars._trials.process.wait()
    assert accepts(await grammars.compile(regex("b"), "f"), "b")


@pytest.mark.parametrize(
    ("tokenizer_json", "ends", "reason"),
    [("{}", {0}, "tokenizer"), (BACKEND.to_str(), set(), "end-of-sequence")],
)
async def test_a_model_without_grammars_says_so(tokenizer_json: str, ends: set[int], reason: str) -> None:
    grammars = GrammarCompiler(lambda: tokenizer_json, ends)
    with grammars.preparing():
        pass
    with pytest.raises(InvalidRequestError, match=reason):
        await grammars.compile(regex("a"), "f")


async def test_what_another_process_has_tried_needs_no_trial(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "_start_trials", None)
    with grammars.preparing(trials=False):
        pass
    grammar = await grammars.compile_tried(regex("ab|c"), "f")
    assert accepts(grammar, "ab")
    assert grammar.source == regex("ab|c")
    assert await grammars.compile_tried(regex("ab|c"), "f") == grammar
    with pytest.raises(InvalidRequestError, match=r"`f`: the regular expression"):
        await grammars.compile_tried(regex("(("), "f")


async def test_closing_ends_the_thread_and_the_process(grammars: GrammarCompiler) -> None:
    before = set(threading.enumerate())
    await grammars.compile(regex("a"), "regex")
    assert grammars._trials is not None
    grammars.close()
    assert grammars._trials.are_over
    assert set(threading.enumerate()) <= before
