from __future__ import annotations

import asyncio
import json
import threading

import pytest
from llguidance import LLTokenizer

from shortfin_apps.llm.components.grammar import compiler
from shortfin_apps.llm.components.grammar.compiled import CompiledGrammar, compiled
from shortfin_apps.llm.components.grammar.compiler import GrammarCompiler
from shortfin_apps.llm.components.grammar.source import (
    GrammarKind,
    GrammarSource,
    choice_source,
    schema_source,
)
from shortfin_apps.llm.components.grammar.trial_process import TrialLimits
from shortfin_apps.llm.components.grammar.trials import MAX_AT_ONCE, Trials
from shortfin_apps.llm.contract.errors import InvalidRequestError, OverloadedError
from tests.components.grammar.hostile import NEVER_COMPILED, UNLIMITED
from tests.serving.text.tiny_tokenizers import byte_level_backend

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
    await asyncio.sleep(0)
    for text in "abc":
        assert accepts(await grammars.compile(regex(text), "f"), text)
    assert not slow.done()
    slow.cancel()


@pytest.mark.timeout(60)
async def test_a_tenant_with_slow_grammars_does_not_delay_others() -> None:
    grammars = GrammarCompiler(BACKEND.to_str, {END}, UNLIMITED)
    schemas = [json.loads(NEVER_COMPILED.text) | {"description": str(number)} for number in range(24)]
    slow = [asyncio.create_task(grammars.compile(schema_source(each), "f", "a")) for each in schemas]
    await asyncio.sleep(0)
    for text in "abc":
        assert accepts(await grammars.compile(regex(text), "f", "b"), text)
    assert not any(each.done() for each in slow)
    for each in slow:
        each.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


def count_trials(monkeypatch: pytest.MonkeyPatch) -> list[GrammarSource]:
    """Has each grammar that is tried appended to a list."""
    tried: list[GrammarSource] = []
    run = Trials.run

    async def counted(trials: Trials, source: GrammarSource) -> None:
        tried.append(source)
        await run(trials, source)

    monkeypatch.setattr(Trials, "run", counted)
    return tried


async def test_a_refused_grammar_is_not_tried_again(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = count_trials(monkeypatch)
    reasons = []
    for param in "fgh":
        with pytest.raises(InvalidRequestError, match="unclosed group") as refused:
            await grammars.compile(regex("(a"), param)
        reasons.append(str(refused.value)[:4])
    assert reasons == ["`f`:", "`g`:", "`h`:"]
    assert tried == [regex("(a")]


async def test_many_requests_with_one_grammar_try_it_at_most_as_often_as_at_once(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = count_trials(monkeypatch)
    many = [grammars.compile(source, "f") for source in [regex("a"), regex("(a")] * 12]
    answers = await asyncio.gather(*many, return_exceptions=True)
    assert len({answer for answer in answers if isinstance(answer, CompiledGrammar)}) == 1
    assert sum(isinstance(answer, InvalidRequestError) for answer in answers) == 12
    assert len(tried) <= MAX_AT_ONCE


async def test_automata_that_are_full_are_compiled_again(grammars: GrammarCompiler) -> None:
    first = await grammars.compile(regex("a"), "f")
    first._worn_out[0] = True
    again = await grammars.compile(regex("a"), "f")
    assert again != first
    assert await grammars.compile(regex("a"), "f") == again


async def test_tenants_take_turns_in_the_thread(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def recorded(source: GrammarSource, tokenizer: LLTokenizer) -> CompiledGrammar:
        order.append(source.text)
        return compile_now(source, tokenizer)

    compile_now = compiled
    monkeypatch.setattr(compiler, "compiled", recorded)
    names = ["a1", "a2", "a3", "b1", "b2"]
    await asyncio.gather(*(grammars.compile_tried(regex(name), "f", name[0]) for name in names))
    assert order == ["a1", "a2", "b1", "a3", "b2"]


async def test_a_request_that_leaves_keeps_its_turn_until_the_thread_is_free(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_end = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(source: GrammarSource, tokenizer: LLTokenizer) -> CompiledGrammar:
        loop.call_soon_threadsafe(began.set)
        may_end.wait()
        return compile_now(source, tokenizer)

    compile_now = compiled
    monkeypatch.setattr(compiler, "compiled", slow)
    leaving = asyncio.create_task(grammars.compile_tried(regex("a"), "f", "a"))
    await began.wait()
    leaving.cancel()
    await asyncio.sleep(0)
    assert not leaving.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await leaving


async def test_what_waits_for_others_is_told_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_AT_ONCE", 1)
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


async def test_where_no_process_can_be_started_a_request_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object) -> None:
        raise BlockingIOError

    grammars = GrammarCompiler(BACKEND.to_str, {END})
    monkeypatch.setattr("shortfin_apps.llm.components.grammar.compiler.Trials", refuse)
    with pytest.raises(OverloadedError, match="try again"):
        await grammars.compile(GrammarSource(GrammarKind.REGEX, "a"), "regex")
    monkeypatch.undo()
    await grammars.compile(GrammarSource(GrammarKind.REGEX, "a"), "regex")
    grammars.close()
