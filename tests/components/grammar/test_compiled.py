from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.gbnf_to_lark import is_lark_syntax

from shortfin_apps.llm.components.grammar.compiled import _IS_LARK, CompiledGrammar, _lark_of
from shortfin_apps.llm.components.grammar.source import GrammarKind, GrammarSource
from shortfin_apps.llm.components.request.grammar import Bitmask
from shortfin_apps.llm.contract.errors import ConstraintError
from tests.serving.text.tiny_tokenizers import byte_level_backend

BACKEND = byte_level_backend()
END = BACKEND.get_vocab_size() - 1
TOKENIZER = LLTokenizer(BACKEND.to_str(), eos_token=END)
A, B = BACKEND.encode("ab").ids


def compiled(regex: str, limits: LLParserLimits | None = None) -> CompiledGrammar:
    matcher = LLMatcher(TOKENIZER, grammar_from("regex", regex), log_level=0, limits=limits)
    return CompiledGrammar(GrammarSource(GrammarKind.REGEX, regex), matcher, TOKENIZER)


def ids(bitmask: Bitmask) -> list[int]:
    bits = np.unpackbits(np.frombuffer(bitmask, np.uint8), bitorder="little")
    return [int(token_id) for token_id in np.flatnonzero(bits)]


def test_matchers_of_one_grammar_are_independent() -> None:
    grammar = compiled("ab|b")
    first, second = grammar.matcher(), grammar.matcher()
    assert sorted(ids(first.allowed([]))) == sorted([A, B])
    assert ids(first.allowed([A])) == [B]
    assert ids(second.allowed([B])) == [END]


def test_tokens_are_taken_once() -> None:
    """A preempted request asks again for the same output."""
    matcher = compiled("ab+").matcher()
    assert ids(matcher.allowed([A])) == ids(matcher.allowed([A])) == [B]
    assert sorted(ids(matcher.allowed([A, B, B]))) == sorted([B, END])


def test_forced_tokens_are_those_that_masks_leave_alone() -> None:
    """As far as the library sees; asking for them changes no mask."""
    asked, silent = (compiled("a(bab|aaa)b*").matcher() for _ in range(2))
    generated: list[int] = []
    forced: list[list[int]] = []
    for token_id in (A, B, A, B, B):
        forced.append(list(asked.forced(generated)))
        assert asked.allowed(generated) == silent.allowed(generated)
        generated.append(token_id)
    assert forced == [[A], [], [A, B], [B], []]


@given(
    st.recursive(
        st.text("ab", min_size=1, max_size=5),
        lambda parts: st.one_of(
            st.lists(parts, min_size=2, max_size=3).map("".join),
            st.lists(parts, min_size=2, max_size=3).map(lambda each: f"({'|'.join(each)})"),
            parts.map(lambda each: f"({each}){{1,2}}"),
        ),
        max_leaves=8,
    ),
    st.lists(st.integers(0, 99), min_size=40, max_size=40),
)
def test_a_forced_token_is_the_only_allowed_one(regex: str, choices: list[int]) -> None:
    """Also each later one of a run, so that all can be appended at once."""
    matcher, generated = compiled(regex).matcher(), list[int]()
    for choice in choices:
        for token_id in list(matcher.forced(generated)):
            assert ids(matcher.allowed(generated)) == [token_id]
            generated.append(token_id)
        allowed = ids(matcher.allowed(generated))
        generated.append(allowed[choice % len(allowed)])
        if generated[-1] == END:
            return


def test_a_grammar_that_is_over_or_has_failed_forces_nothing() -> None:
    ended, failed = compiled("ab").matcher(), compiled("ab").matcher()
    assert list(ended.forced([A, B, END])) == list(failed.forced([B])) == []
    with pytest.raises(ConstraintError, match="after 1 tokens"):
        failed.allowed([B])


def test_tokens_that_do_not_match_are_an_error() -> None:
    with pytest.raises(ConstraintError, match="after 1 tokens"):
        compiled("ab").matcher().allowed([B])


def test_a_failure_is_the_requests_own_and_names_its_field() -> None:
    with pytest.raises(ConstraintError, match="`guided_regex`: the regular expression failed") as caught:
        compiled("ab").named("guided_regex").matcher().allowed([B])
    assert caught.value.param == "guided_regex"


def ambiguous(step_max_items: int) -> CompiledGrammar:
    source = GrammarSource(GrammarKind.EBNF, 'start: "b" | "a" x\nx: x x | /[ab]/ | ""')
    limits = LLParserLimits(step_max_items=step_max_items, verbose_errors=False)
    matcher = LLMatcher(TOKENIZER, grammar_from("ebnf", source.text), log_level=0, limits=limits)
    return CompiledGrammar(source, matcher, TOKENIZER)


def test_a_grammar_that_fails_on_proposed_tokens_goes_on_without_them() -> None:
    matcher, expected = ambiguous(50).matcher(), ambiguous(50).matcher()
    with pytest.raises(ConstraintError, match="Too many items"):
        matcher.allowed([], [A] * 80)
    assert matcher.allowed([]) == expected.allowed([])
    assert matcher.allowed([A, B], [A]) == expected.allowed([A, B], [A])
    with pytest.raises(ConstraintError, match="Too many items"):
        matcher.allowed([A, B, *[A] * 80])


def test_automata_that_are_full_are_worn_out_and_other_failures_leave_them() -> None:
    limits = LLParserLimits(max_lexer_states=100, verbose_errors=False)
    full = compiled("[ab]{0,500}c[ab]{0,50}", limits)
    for grammar, worn_out in ((full, True), (ambiguous(50), False)):
        named, matcher = grammar.named("g"), grammar.matcher()
        with pytest.raises(ConstraintError, match=r"[Tt]oo many"):
            [matcher.allowed([A] * index) for index in range(200)]
        assert grammar.is_worn_out is named.is_worn_out is worn_out


@pytest.mark.timeout(60)
@pytest.mark.parametrize("end", ['a: "a"\nstart: a', " \t start : ", '\u2028%llguidance {}\nstart: "a"'])
def test_lark_is_told_from_gbnf_in_linear_time(end: str) -> None:
    text = "\n" * 1_000_000 + end
    assert _lark_of(text) == text


@given(
    st.lists(st.sampled_from(["start", ":", "%llguidance", "x", " ", "\t", "\r", "\n", "\u2028"])).map(
        "".join
    )
)
def test_lark_is_told_from_gbnf_as_the_library_does(text: str) -> None:
    assert (_IS_LARK.search(text) is not None) == is_lark_syntax(text)


def test_a_grammar_that_costs_too_much_has_a_problem() -> None:
    limits = LLParserLimits(initial_lexer_fuel=200_000, step_lexer_fuel=50_000, verbose_errors=False)
    assert "too many" in compiled("a{100000}", limits).problem()
    assert compiled("a{100}", limits).problem() == ""


def fresh_mask(generated: Sequence[int]) -> list[int] | None:
    """The tokens that a new matcher allows; None if it fails."""
    try:
        return ids(compiled("a(bab|aaa)[ab]{0,4}").matcher().allowed(generated))
    except ConstraintError:
        return None


@given(st.lists(st.tuples(st.lists(st.sampled_from([A, B]), max_size=4), st.integers(0, 5)), max_size=8))
def test_tokens_that_were_proposed_are_taken_back(rounds: list[tuple[list[int], int]]) -> None:
    """In each round some are, each behind the last, and some other tokens are chosen."""
    matcher = compiled("a(bab|aaa)[ab]{0,4}").matcher()
    generated: list[int] = []
    for proposed, num_chosen in rounds:
        for count in range(len(proposed) + 1):
            expected = fresh_mask([*generated, *proposed[:count]])
            if count and expected is None:
                with pytest.raises(ConstraintError, match="proposed"):
                    matcher.allowed(generated, proposed[:count])
            else:
                assert ids(matcher.allowed(generated, proposed[:count])) == expected
        for token_id in (*proposed[: num_chosen // 2], *[A] * num_chosen)[:num_chosen]:
            if fresh_mask([*generated, token_id]) is not None:
                generated.append(token_id)
        if num_chosen % 2:
            assert list(matcher.forced(generated)) == list(forced_after(generated))


def forced_after(generated: Sequence[int]) -> Sequence[int]:
    return compiled("a(bab|aaa)[ab]{0,4}").matcher().forced(generated)


GRAMMARS = {
    "regex": grammar_from("regex", "(ab|ba){2,5}[0-9]*"),
    "lark": grammar_from("lark", 'start: x\nx: "a" x "b" | /[c-e]+/'),
    "schema": LLMatcher.grammar_from_json_schema(
        {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
    ),
}


@given(st.data(), st.lists(st.sampled_from(sorted(GRAMMARS)), min_size=1, max_size=6))
def test_masks_of_many_requests_are_the_librarys(data: st.DataObject, names: list[str]) -> None:
    """Requests of the same and of other grammars write masks in turns; one that fails affects no other."""
    starts = {name: LLMatcher(TOKENIZER, text, log_level=0) for name, text in GRAMMARS.items()}
    source = GrammarSource(GrammarKind.LARK, "")
    made = {name: CompiledGrammar(source, start, TOKENIZER) for name, start in starts.items()}
    rows = [(made[name].matcher(), starts[name].deep_copy(), list[int]()) for name in names]
    for _ in range(8):
        masks = []
        for matcher, reference, generated in rows:
            if generated[-1:] == [END]:
                continue
            expected = reference.compute_bitmask()
            if reference.is_error():
                with pytest.raises(ConstraintError):
                    matcher.allowed(generated)
                continue
            masks.append((matcher.allowed(generated), expected))
            wrong = data.draw(st.booleans()) and data.draw(st.booleans())
            token_id = data.draw(st.integers(0, END) if wrong else st.sampled_from(ids(expected)))
            generated.append(token_id)
            reference.consume_token(token_id)
        assert all(mask == expected for mask, expected in masks), "other rows leave a mask alone"


def test_a_mask_is_written_in_place() -> None:
    matcher = compiled("ab").matcher()
    first = matcher.allowed([])
    assert matcher.allowed([A]) is first
    assert ids(first) == [B]
