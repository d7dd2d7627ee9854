from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import AddedToken

from shortfin_apps.llm.components.grammar.compiled import compiled
from shortfin_apps.llm.components.grammar.source import ANY_TOKENS, GrammarKind, GrammarSource
from shortfin_apps.llm.components.grammar.thought_budget import ThoughtBudget
from shortfin_apps.llm.components.request.grammar import GrammarMatcher
from shortfin_apps.llm.contract.errors import ConstraintError
from tests.serving.text.tiny_tokenizers import EOS, byte_level_backend

BACKEND = byte_level_backend()
BACKEND.add_tokens([AddedToken("</t>"), AddedToken("<t>")])
TOKENIZER = LLTokenizer(BACKEND.to_str(), eos_token=BACKEND.token_to_id(EOS))
TEXT_THEN_B = GrammarSource(GrammarKind.LARK, 'start: t "b"\nt[suffix="END"]: /(.|\\n)*/')
PIECES = ["a", "the", " ", "€", "😀", "END", "E", "</t>", "<t>", "BEGIN"]


def ids(text: str) -> list[int]:
    token_ids: list[int] = BACKEND.encode(text).ids
    return token_ids


def matcher_of(
    max_tokens: int,
    begins: tuple[str, ...] = (),
    ends: tuple[str, ...] = ("</t>",),
    source: GrammarSource = ANY_TOKENS,
) -> GrammarMatcher:
    budget = ThoughtBudget(max_tokens, begins, ends)
    return compiled(GrammarSource(source.kind, source.text, budget=budget), TOKENIZER).matcher()


def choices(matcher: GrammarMatcher, generated: list[int], ahead: list[int] | None = None) -> set[int]:
    mask = int.from_bytes(matcher.allowed(generated, ahead or []), "little")
    return {token_id for token_id in range(TOKENIZER.vocab_size) if mask >> token_id & 1}


def output_of(matcher: GrammarMatcher, wishes: list[int]) -> list[int]:
    """Take the wishes, except where one token is left."""
    token_ids: list[int] = []
    for wish in wishes:
        left = choices(matcher, token_ids)
        token_ids.append(left.pop() if len(left) == 1 else wish)
    return token_ids


@settings(max_examples=100, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=12),
    max_tokens=st.integers(0, 12),
    begin=st.sampled_from(["", "<t>", "BEGIN"]),
    end=st.sampled_from(["</t>", "END"]),
)
def test_a_thought_ends_by_its_budget(pieces: list[str], max_tokens: int, begin: str, end: str) -> None:
    """The output is what is wished until the budget is spent, then the end, then what is wished."""
    wishes = [token_id for text in (begin, *pieces) for token_id in ids(text)]
    output = output_of(matcher_of(max_tokens, (begin,) if begin else (), (end,)), wishes)
    first = len(ids(begin)) + max_tokens
    assert output[:first] == wishes[:first]
    if end in TOKENIZER.decode_str(wishes[len(ids(begin)) : first]):
        assert output == wishes
        return
    changes = [place for place, pair in enumerate(zip(output, wishes, strict=True)) if pair[0] != pair[1]]
    if len(wishes) > first + 3 + len(ids(end)):
        thought, found, _ = TOKENIZER.decode_bytes(output[len(ids(begin)) :]).partition(end.encode())
        assert found
        thought.decode()  # no character is cut
        assert len(BACKEND.encode(thought.decode()).ids) <= max_tokens + 3
    assert all(first <= place < first + 3 + len(ids(end)) for place in changes)


@pytest.mark.parametrize("source", [ANY_TOKENS, TEXT_THEN_B], ids=["any", "text"])
def test_proposed_tokens_meet_the_budget(source: GrammarSource) -> None:
    """Masks after proposals are those after the same output, and proposals are dropped as if never made."""
    output = [*ids("aEN"), *ids("aa"), *ids("END"), *ids("b")]
    plain = matcher_of(5, ends=("END",), source=source)
    expected = [choices(plain, output[:size]) for size in range(len(output))]
    for num_kept in range(len(output)):
        matcher = matcher_of(5, ends=("END",), source=source)
        for size in range(num_kept, len(output)):
            assert choices(matcher, output[:num_kept], output[num_kept:size]) == expected[size]
        assert choices(matcher, output[:num_kept]) == expected[num_kept]


def test_a_thought_that_is_only_proposed_has_not_begun() -> None:
    """Nor is there none because other tokens are proposed."""
    for proposed, begins_later in (("aa", True), ("BEGINaa", False)):
        matcher = matcher_of(2, ("BEGIN",), ("END",))
        matcher.allowed([], ids(proposed))
        text = " \nBEGINaa" if begins_later else "aaaaaaaaa"
        assert list(matcher.forced(ids(text))) == (ids("END") if begins_later else [])


def test_proposals_against_the_budget_are_refused() -> None:
    matcher = matcher_of(2, ends=("END",))
    with pytest.raises(ConstraintError):
        matcher.allowed(ids("a"), ids("aaa"))
    assert choices(matcher, ids("aa")) == set(ids("E"))
    with pytest.raises(ConstraintError):
        matcher.allowed(ids("aaE"), ids("D"))
    assert list(matcher.forced(ids("aaE"))) == ids("ND")


def test_the_end_is_forced_together() -> None:
    matcher = matcher_of(2, ends=("END",))
    assert [list(matcher.forced(ids(text))) for text in ("", "a", "aa")] == [[], [], ids("END")]
    assert list(matcher.forced(ids("aaEND"))) == []


def test_an_end_that_has_begun_is_completed() -> None:
    assert list(matcher_of(3, ends=("END",)).forced(ids("aEN"))) == ids("D")


def test_any_of_several_ends_is_one() -> None:
    assert list(matcher_of(4, ends=("END", "FIN")).forced(ids("aFIN"))) == []


@pytest.mark.parametrize("budget", [None, ThoughtBudget(3, ("<t>",), ("</t>", "END"))])
def test_a_source_is_sent_with_its_budget(budget: ThoughtBudget | None) -> None:
    source = GrammarSource(GrammarKind.LARK, "start: /a/", budget=budget)
    assert GrammarSource.from_json(source.to_json()) == source
